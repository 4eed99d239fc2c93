"""Trains batch norm over the joined batch of several ranks with lockstep, and on the whole batch in one process with
Python's, and compares outputs, gradients and running statistics. The last step is in eval mode.

usage: sync_batch_norm_parity.py PROGRAM [RANKS...]

The parts of the ranks are unequal, one of them empty at three and four ranks. Afterwards lockstep is broken on purpose,
and the comparison must find each way.
"""

import os
import sys
import tempfile

from parity import raw, require_same_library, run_program, run_python, torch, write

PARTS = {2: [5, 2], 3: [4, 0, 3], 4: [1, 6, 0, 2]}
STEPS, CHANNELS = 4, 5
INNER = {1: [7], 2: [6, 5], 3: [3, 4, 5]}
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
QUANTITIES = ["outputs", "gradients of the input", "gradients of weight and bias", "running statistics"]


def case(name, dimensions, dtype, words="", momentum=0.1, affine=True, channels_last=False, inner=None):
    return locals()


CASES = [
    case(f"plain-{d}-{dtype}", d, dtype) for d in (1, 2, 3) for dtype in ("float64", "float32")
] + [
    case("flat", 1, "float64", ", [N, C]", inner=[]),
    case("none", 2, "float64", ", `momentum=None`", momentum=None),
    case("none-32", 2, "float32", ", `momentum=None`", momentum=None),
    case("bare", 2, "float64", ", `affine=False`", affine=False),
    case("bare-32", 2, "float32", ", `affine=False`", affine=False),
    case("last", 2, "float64", ", `channels_last`", channels_last=True),
    case("last-32", 2, "float32", ", `channels_last`", channels_last=True),
    case("last-3", 3, "float32", ", `channels_last_3d`", channels_last=True),
]  # fmt: skip


def shape_of(c):
    return [CHANNELS, *(INNER[c["dimensions"]] if c["inner"] is None else c["inner"])]


def draw(c, ranks):
    """Weight and bias, then for each step the input of all ranks and the slopes of its loss."""
    generator = torch.Generator().manual_seed(CASES.index(c))
    dtype, whole = getattr(torch, c["dtype"]), [sum(PARTS[ranks]), *shape_of(c)]
    make = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    affine = [make([CHANNELS]), make([CHANNELS])]
    steps = [(make(whole) * 2 + 3, make(whole)) for _ in range(STEPS)]
    return [t.to(dtype) for t in affine], [(x.to(dtype), slope.to(dtype)) for x, slope in steps]


def write_inputs(folder, ranks):
    with open(f"{folder}/cases", "w") as file:
        for c in CASES:
            affine, steps = draw(c, ranks)
            write(f"{folder}/{c['name']}", b"".join(map(raw, affine + [t for step in steps for t in step])))
            print(c["name"], c["dtype"], c["dimensions"], STEPS, int(c["affine"]), int(c["channels_last"]),
                  -1 if c["momentum"] is None else c["momentum"], ",".join(map(str, PARTS[ranks])),
                  ",".join(map(str, shape_of(c))), file=file)  # fmt: skip


def train(c, ranks):
    """Python's batch norm on the joined batch: a list of (output, gradient of the input, of weight, of bias) a step,
    then the running statistics."""
    affine, steps = draw(c, ranks)
    kind = getattr(torch.nn, f"BatchNorm{c['dimensions']}d")
    norm = kind(CHANNELS, momentum=c["momentum"], affine=c["affine"], dtype=affine[0].dtype)
    layout = torch.contiguous_format
    if c["channels_last"]:
        layout = torch.channels_last if c["dimensions"] == 2 else torch.channels_last_3d
    if c["affine"]:
        with torch.no_grad():
            norm.weight.copy_(affine[0])
            norm.bias.copy_(affine[1])
    results = []
    for step, (x, slope) in enumerate(steps):
        norm.train(step + 1 < STEPS)
        norm.zero_grad()
        x = x.contiguous(memory_format=layout).requires_grad_()
        output = norm(x)
        (output * slope).sum().backward()
        results.append([output.detach(), x.grad] + ([norm.weight.grad, norm.bias.grad] if c["affine"] else []))
    return results, [norm.running_mean, norm.running_var, norm.num_batches_tracked]


def errors(c, ranks, folder):
    """The largest error of each of QUANTITIES, relative to the largest element of what is compared."""
    results, running = train(c, ranks)
    worst = dict.fromkeys(QUANTITIES, 0.0)
    dtype = running[0].dtype

    def compare(quantity, actual, expected):
        if actual.numel():
            scale = expected.abs().max().clamp(min=1e-30)
            error = ((actual - expected).abs().max() / scale).item()
            worst[quantity] = max(worst[quantity], error if error == error else float("inf"))

    files = [torch.frombuffer(bytearray(open(f"{folder}/{c['name']}.{r}", "rb").read()), dtype=dtype) for r in range(ranks)]
    offsets = [0] * ranks

    def take(rank, shape):
        count = torch.Size(shape).numel()
        taken = files[rank][offsets[rank] : offsets[rank] + count].view(shape)
        offsets[rank] += count
        return taken

    parts = PARTS[ranks]
    for output, of_input, *of_affine in results:
        taken = [(take(r, [parts[r], *output.shape[1:]]), take(r, [parts[r], *output.shape[1:]]),
                  *(take(r, [CHANNELS]) for _ in of_affine)) for r in range(ranks)]  # fmt: skip
        outputs, of_inputs, *of_affines = zip(*taken)
        compare("outputs", torch.cat(outputs), output)
        compare("gradients of the input", torch.cat(of_inputs), of_input)
        for actual, expected in zip(of_affines, of_affine):
            compare("gradients of weight and bias", sum(actual), expected)
    for expected in running:
        for rank in range(ranks):
            compare("running statistics", take(rank, expected.shape), expected.to(dtype))
    if any(offset != len(file) for offset, file in zip(offsets, files)):
        sys.exit(f"{c['name']}: the program wrote another number of elements")
    if not c["affine"]:
        del worst["gradients of weight and bias"]
    return worst


def ask_python(rank, _ranks, output):
    """What Python's own SyncBatchNorm says to an input on a CPU."""
    try:
        torch.nn.SyncBatchNorm(CHANNELS)(torch.randn(4, CHANNELS))
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    write(f"{output}/said.{rank}", said.encode())


def run_lockstep(program, ranks, folder, output, *mutation):
    os.makedirs(output)
    run_program(program, "--nproc", ranks, folder, output, *mutation)


def main():
    program, sizes = sys.argv[1], [int(word) for word in sys.argv[2:]] or list(PARTS)
    require_same_library(program)
    failures = 0
    worst = {c["name"]: {} for c in CASES}
    with tempfile.TemporaryDirectory(prefix="lockstep-batch-norm-") as folder:
        run_python(2, ask_python, f"{folder}/python")
        said = open(f"{folder}/python/said.0").read()
        torch.set_num_threads(1)
        for ranks in sizes:
            inputs, outputs = f"{folder}/in-{ranks}", f"{folder}/out-{ranks}"
            os.makedirs(inputs)
            write_inputs(inputs, ranks)
            run_lockstep(program, ranks, inputs, outputs)
            for c in CASES:
                for quantity, error in errors(c, ranks, outputs).items():
                    worst[c["name"]][quantity] = max(worst[c["name"]].get(quantity, 0.0), error)
        print("note: Python's own SyncBatchNorm " + (f"refuses CPUs (`{said}`)" if said else "takes CPUs as well") +
              f"; so one process has the joined batch. The ranks' parts at {', '.join(map(str, sizes))} ranks: "
              f"{'; '.join('+'.join(map(str, PARTS[ranks])) for ranks in sizes)} samples. Allowed: "
              f"{TOLERANCES['float64']:.0e} in float64, {TOLERANCES['float32']:.0e} in float32.")  # fmt: skip
        print("\n| layer | Python: BatchNorm on the joined batch | lockstep: largest relative error |\n|---|---|---|")
        for c in CASES:
            wrong = any(error > TOLERANCES[c["dtype"]] for error in worst[c["name"]].values())
            failures += wrong
            text = ", ".join(f"{quantity} {error:.0e}" for quantity, error in worst[c["name"]].items())
            print(f"| {c['dimensions']}d, {c['dtype']}{c['words']} | {STEPS - 1} steps and one in eval mode at "
                  f"{', '.join(map(str, sizes))} ranks | {'TOO FAR: ' if wrong else ''}{text} |")  # fmt: skip
        ranks = sizes[0]
        for mutation, seen_in in {"forget": "outputs", "apart": "gradients of the input"}.items():
            broken = f"{folder}/{mutation}"
            run_lockstep(program, ranks, f"{folder}/in-{ranks}", broken, mutation)
            least = min(errors(c, ranks, broken)[seen_in] / TOLERANCES[c["dtype"]] for c in CASES)
            failures += least <= 1
            print(f"broken on purpose at {ranks} ranks ({mutation}): {'found in each case' if least > 1 else 'NOT FOUND'}")
    sys.exit(f"{failures} comparisons failed" if failures else 0)


if __name__ == "__main__":
    main()
