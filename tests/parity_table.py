"""Makes docs/parity.md of what the tests labelled `parity` have printed in the last run of ctest.

usage: parity_table.py BUILD_FOLDER OUTPUT
"""

import os
import re
import sys

HEADINGS = {
    "ddp_parity": ("DistributedDataParallel", "Parameters and buffers of every rank, compared word by word."),
    "hooks_parity": ("Communication hooks", "The average that a hook leaves in the bucket, and what it has sent."),
    "optim_parity": ("Optimizers, clipping, averages, schedules", "Parameters and states, compared word by word."),
    "parity_precision": ("Precisions", "Scales, counters and parameters after each step."),
    "parity_samplers": ("Samplers", "Every index of every rank and epoch."),
    "parity_mnist": ("The MNIST example", "The program itself beside the tutorial's in Python, on real digits."),
}


def sections(text):
    """Test name, whether it passed, and the lines that it printed."""
    for part in re.split(r"^\d+/\d+ Testing: ", text, flags=re.M)[1:]:
        output = re.search(r"^Output:\n-+\n(.*?)^<end of output>", part, flags=re.M | re.S)
        if output:
            yield part.split("\n", 1)[0], "\nTest Passed.\n" in part, output[1].splitlines()


def main():
    build, target = sys.argv[1:]
    with open(os.path.join(build, "Testing", "Temporary", "LastTest.log")) as file:
        found = {name: (passed, lines) for name, passed, lines in sections(file.read())}
    skipped = {name: [line for line in lines if "SKIPPED" in line] for name, (passed, lines) in found.items() if not passed}
    missing = [name for name in HEADINGS if name not in found or name in skipped and not skipped[name]]
    if missing:
        sys.exit(f"not run, or failed, so that there is no table to write: {', '.join(missing)}")
    with open(target, "w") as file:
        file.write("# Parity with Python\n\nEach line is a comparison of lockstep with the real `torch` package, both loading the "
                   "same `libtorch_cpu.so`, made\nby the tests with the label `parity`. \"Same bits\" means that no bit differs. "
                   "Repeat it and write this page anew with\n\n```\ncmake --build build/test --target parity_table\n```\n")
        for name, (title, words) in HEADINGS.items():
            lines = found[name][1]
            if name in skipped:
                print(f"not compared: {skipped[name][0].strip()}")
                file.write(f"\n## {title}\n\nNot compared in this run: {skipped[name][0].strip()}\n")
                continue
            table = [line for line in lines if line.startswith("|")]
            rest = [line for line in lines if line and not line.startswith("|") and "Warning" not in line][-1:]
            file.write(f"\n## {title}\n\n{words}\n\n" + "\n".join(table or rest) + "\n")
            broken = [line for line in lines if "broken" in line]
            if broken:
                file.write("\nBroken on purpose, and found:\n\n" + "\n".join(f"- {line}" for line in broken) + "\n")


if __name__ == "__main__":
    main()
