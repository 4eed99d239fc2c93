"""Makes tests/parity.md, and its summary docs/parity.md, of what the tests with `parity` in their names have printed in the
last run of ctest.

usage: parity_table.py BUILD_FOLDER

Of a test's lines the page takes tables, lines that begin with `note: `, and those that tell what was broken on purpose.
"""

import importlib.metadata
import os
import re
import sys
import textwrap

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
import record

# The heading of a test, what it compares, and what it fails without.
HEADINGS = {
    "ddp_parity": ("DistributedDataParallel", "Parameters and buffers of every rank, compared word by word.", "same bits"),
    "ddp_errors_parity": ("Misuse", "How the ranks ended in this run. A rank whose error is not caught ends, as any program does.\n"
                          "The test fails where lockstep does not throw that error on every rank.", "an error on every rank, where Python hangs, dies or trains on"),
    "hooks_parity": ("Communication hooks", "The average that a hook leaves in the bucket, and what it has sent.", "same bits but of PowerSGD's tensors that are not compressed, which are exact"),
    "sync_batch_norm_parity": ("SyncBatchNorm", "Results of all ranks together, and one process's.", "within 1e-10 in float64 and 1e-5 in float32 of one process with the joined batch"),
    "optim_parity": ("Optimizers, clipping, averages, schedules", "Parameters and states, compared word by word.", "same bits; rates within 1e-12"),
    "interchange_parity": ("Interchange", "A run that one side saved and the other continued, beside the run that was not interrupted.", "same bits"),
    "parity_precision": ("Precisions", "Scales, counters and parameters after each step, compared word by word with `torch.amp`'s.", "same bits"),
    "parity_samplers": ("Samplers", "Every index of every rank and epoch.", "the same"),
    "parity_mnist": ("The MNIST examples", "The programs mnist, origin_main and ddp_main beside the tutorial's in Python, on real digits.", "same bits; with SyncBatchNorm the accuracy of one process"),
    "parity_multigpu": ("The toy regression", "The programs single_gpu, multigpu, ddp_gpus and multigpu_torchrun beside the same training in Python.", "same bits"),
    "parity_average_gradients": ("Gradients averaged by hand", "The program itself beside the tutorial's in Python, on real digits.", "same bits"),
    "parity_imagenet": ("The ImageNet example", "Training, initial values, losses and checkpoints beside the same networks in Python.", "same bits, losses and checkpoints; resized pixels at most 1 of 255 apart"),
    "parity_mingpt": ("The minGPT example", "The program itself beside the same model in Python, on tiny Shakespeare.", "same bits"),
}  # fmt: skip

SUMMARY = """# Parity with Python

The tests with `parity` in their names compare lockstep with the real `torch` package ({version}); both load one
`libtorch_cpu.so`. "Same bits" means that no bit differs. Most of them also break lockstep on purpose, and fail unless they see it.
[The whole table](../tests/parity.md) has a row for each comparison. Repeat them, and write both pages anew, with

```sh
cmake --build build/test --target parity_table
```

{record}

| what | what is compared | comparisons | lockstep |
|---|---|---|---|
"""

HEAD = """# Parity with Python, in full

Each line is a comparison of lockstep with the real `torch` package ({version}): [parity.md](../docs/parity.md) says how to
repeat it.

{record}
"""


def sections(text):
    """Test name, whether it passed, and the lines that it printed."""
    for part in re.split(r"^\d+/\d+ Testing: ", text, flags=re.M)[1:]:
        output = re.search(r"^Output:\n-+\n(.*?)^<end of output>", part, flags=re.M | re.S)
        if output:
            yield part.split("\n", 1)[0], "\nTest Passed.\n" in part, output[1].splitlines()


def body(lines):
    """Tables and notes in the order in which they were printed, then what was broken."""
    text, in_table = "", False
    for line in lines:
        row = line.startswith("|")
        if row or line.startswith("note: "):
            words = line if row else textwrap.fill(line.removeprefix("note: "), 120, break_on_hyphens=False)
            text += ("" if row and in_table else "\n") + words + "\n"
            in_table = row
    broken = [line for line in lines if "broken" in line and not line.startswith("|")]
    if broken:
        text += "\nDeliberate defects, each detected by the comparison:\n\n" + "".join(f"- {line}\n" for line in broken)
    return text


def summary_row(name, text, skipped):
    """The row of a section of the whole table: its comparisons are the rows of its tables, without their heads."""
    title, words, result = HEADINGS[name]
    if skipped:
        result = "not compared in this run"
    rows = len(re.findall(r"^\|", text, re.M)) - 2 * len(re.findall(r"^\|(?:---\|)+$", text, re.M))
    anchor = re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-")
    return f"| [{title}](../tests/parity.md#{anchor}) | {words.split('. ')[0].rstrip('.')} | {rows} | {result} |\n"


def main():
    (build,) = sys.argv[1:]
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    with open(os.path.join(build, "Testing", "Temporary", "LastTest.log")) as file:
        found = {name: (passed, lines) for name, passed, lines in sections(file.read())}
    # A comparison at all numbers of ranks says more than the one at three.
    found = {name: found.get(f"{name}_all", test) for name, test in found.items()}
    # ctest has "Test Passed." of a skipped one, too.
    skipped = {name: line for name, (_, lines) in found.items() for line in lines if re.match(r"SKIPPED \S+:", line)}
    missing = [name for name in HEADINGS if name not in found or not (found[name][0] or name in skipped)]
    if missing:
        sys.exit(f"not run, or failed, so that there is no table to write: {', '.join(missing)}")
    values = {"version": importlib.metadata.version("torch"), "record": record.comment(
        "cmake --build build/test --target parity_table", "CPU, threads, time", page=True)}  # fmt: skip
    whole, summary = HEAD.format(**values), SUMMARY.format(**values)
    for name, (title, words, _) in HEADINGS.items():
        text = body(found[name][1])
        if name in skipped:
            print(f"not compared: {skipped[name]}")
            text = f"\nNot compared in this run: {skipped[name]}\n"
        whole += f"\n## {title}\n\n{words}\n{text}"
        summary += summary_row(name, text, name in skipped)
    for path, text in ("tests/parity.md", whole), ("docs/parity.md", summary):
        with open(os.path.join(root, path), "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
