"""Reduces the same gradients with the communication hooks of the real Python package and with lockstep's, over Gloo,
and compares the averages of every rank, bucket and step.

usage: hooks_parity.py PROGRAM [RANKS...]

The Python hooks are called as DDP calls them, on the buckets of a step in order. Bits are compared everywhere but in
two places, where lockstep leaves Python's PowerSGD: with error feedback, Python also keeps errors of tensors that it does
not compress, so that the rounding of a large gradient is added to the small ones after it; here these tensors are
compared with the exact average. And of a gradient of zeros Python makes not-a-numbers.

Times are the medians of rank 0 over the steps, from the third on, of a bucket's start to its end. Afterwards lockstep is
broken on purpose, and the comparison must find it for each hook.
"""

import math
import os
import statistics
import sys
import tempfile
import time

from parity import dist, raw, require_same_library, run_program, run_python, torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

SMALL = [[(40, 30), (7,)], [(600,)], [(16, 3, 3, 3), (16,), (1,)]]
# A shape that recurs after another one: PowerSGD goes shape by shape.
LARGE = [[(256, 128), (256,), (96, 64), (256, 128)], [(64, 3, 5, 5), (10,)], [(33, 65), (9, 8)]]
# One bucket, so that both sides do the same one after the other: these cases are timed as well.
TIMED = [[(512, 512), (512,)]]
# Between a tensor that is not compressed and the exact average, relative to the largest of its bucket.
TOLERANCE = 1e-6


def case(name, hook, plan, steps=4, rank=1, start=2, rate=2.0, feedback=1, warm=1, epsilon=0.0, seed=0, channel=0,
         within=1, zeros=None):  # fmt: skip
    return locals()


CASES = [
    case("fp16", "fp16", SMALL),
    case("bf16", "bf16", SMALL),
    case("fp16-large", "fp16", LARGE),
    case("no-op", "no_op", SMALL),
    case("post-local-sgd", "post_local_sgd", SMALL),
    case("post-local-sgd-alone", "post_local_sgd", SMALL, within=0),
    case("quantized-per-tensor", "quantized", LARGE),
    case("quantized-per-channel", "quantized", LARGE, channel=512),
    case("power-sgd", "power_sgd", LARGE, steps=8),
    case("power-sgd-rank-2", "power_sgd", LARGE, steps=8, rank=2),
    case("power-sgd-rank-4", "power_sgd", LARGE, steps=8, rank=4, rate=1.0),
    case("power-sgd-cold", "power_sgd", LARGE, steps=8, rank=2, warm=0, seed=7),
    case("power-sgd-no-feedback", "power_sgd", LARGE, steps=8, feedback=0),
    case("power-sgd-epsilon", "power_sgd", LARGE, steps=8, rank=2, epsilon=1e-8),
    case("power-sgd-zeros", "power_sgd", [[(40, 30)]], steps=6, rank=2, feedback=0, zeros=4),
    case("fp16-timed", "fp16", TIMED, steps=9),
    case("quantized-timed", "quantized", TIMED, steps=9),
    case("power-sgd-timed", "power_sgd", TIMED, steps=9, rank=2),
]


class Bucket:
    """What a hook sees of a GradBucket, which Python cannot construct."""

    def __init__(self, index, count, shapes):
        self._index, self._last = index, index + 1 == count
        self._shapes = shapes
        self._buffer = torch.empty(sum(math.prod(shape) for shape in shapes))

    def index(self):
        return self._index

    def buffer(self):
        return self._buffer

    def set_buffer(self, tensor):
        self._buffer = tensor

    def is_last(self):
        return self._last

    def gradients(self):
        parts = self._buffer.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]


def gradients_of(c, rank, step):
    generator = torch.Generator().manual_seed(1000 * CASES.index(c) + 10 * step + rank)
    flats = []
    for shapes in c["plan"]:
        flat = torch.cat([torch.randn(shape, generator=generator).view(-1) for shape in shapes])
        flats.append(flat * 10.0 ** (step % 6 - 2))
    if c["zeros"] == step:
        flats = [torch.zeros_like(flat) for flat in flats]
    if c["hook"] in ("fp16", "bf16") and step == 2 and rank == 1:
        flats[0][:6] = torch.tensor([math.nan, math.inf, -math.inf, 1e5, 1e-9, 3e38])
    return flats


def write_inputs(folder, ranks):
    for c in CASES:
        for rank in range(ranks):
            with open(f"{folder}/{c['name']}.{rank}", "wb") as file:
                for step in range(c["steps"]):
                    for flat in gradients_of(c, rank, step):
                        file.write(raw(flat))
    with open(f"{folder}/cases", "w") as file:
        for c in CASES:
            plan = ";".join(",".join("x".join(map(str, shape)) for shape in shapes) for shapes in c["plan"])
            print(c["name"], c["hook"], plan, c["steps"], c["rank"], c["start"], c["rate"], c["feedback"], c["warm"],
                  c["epsilon"], c["seed"], c["channel"], c["within"], file=file)  # fmt: skip


def python_hook(c, subgroup):
    if c["hook"] == "post_local_sgd":
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup, c["start"], bool(c["within"]))
        return lambda bucket: post_localSGD_hook.post_localSGD_hook(state, bucket)
    if c["hook"] == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            None, c["rank"], c["start"], c["rate"], bool(c["feedback"]), bool(c["warm"]), c["epsilon"], c["seed"]
        )
        return lambda bucket: powerSGD_hook.powerSGD_hook(state, bucket)
    if c["hook"] == "quantized" and c["channel"]:
        return lambda bucket: quantization_hooks.quantization_perchannel_hook(None, bucket, c["channel"])
    hook = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "quantized": quantization_hooks.quantization_pertensor_hook,
        "no_op": noop_hook,
    }[c["hook"]]
    return lambda bucket: hook(None, bucket)


class CountedBytes:
    """While it lives, the bytes that this process gives to collectives."""

    def __enter__(self):
        self.bytes = 0
        self.plain = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}
        for name, given in (("all_reduce", 0), ("all_gather", 1)):
            setattr(dist, name, self.counting(self.plain[name], given))
        return self

    def counting(self, collective, given):
        def counted(*arguments, **options):
            if dist.get_world_size(options.get("group")) > 1:
                self.bytes += arguments[given].nbytes
            return collective(*arguments, **options)

        return counted

    def __exit__(self, *_):
        for name, collective in self.plain.items():
            setattr(dist, name, collective)


def reduce_all(rank, ranks, output):
    # Rank 0 alone, and the others together.
    groups = [dist.new_group([0]), dist.new_group(list(range(1, ranks)))]
    for c in CASES:
        hook = python_hook(c, groups[min(rank, 1)])
        buckets = [Bucket(i, len(c["plan"]), shapes) for i, shapes in enumerate(c["plan"])]
        times = []
        with open(f"{output}/{c['name']}.{rank}", "wb") as file, CountedBytes() as counted:
            for step in range(c["steps"]):
                for bucket, flat in zip(buckets, gradients_of(c, rank, step)):
                    bucket.set_buffer(flat)
                # One after the other: the later collectives of these hooks start on a thread of Gloo's, in an order
                # that two buckets under way at once would leave to chance.
                dist.barrier()
                for bucket in buckets:
                    start = time.perf_counter()
                    future = hook(bucket)
                    future.wait()
                    times.append(time.perf_counter() - start)
                    result = future.value()
                    file.write(raw(result[0] if isinstance(result, (list, tuple)) else result))
        if rank == 0:
            with open(f"{output}/{c['name']}.ms", "w") as file:
                print(1e3 * statistics.median(times[2 * len(buckets) :]), counted.bytes, file=file)


def run_lockstep(program, ranks, folder, output, *mutation):
    """Bytes and milliseconds of each case."""
    os.makedirs(output)
    printed = run_program(program, "--nproc", ranks, folder, output, *mutation)
    lines = [line.split() for line in printed.splitlines() if " bytes " in line]
    return {words[0]: (int(words[2]), float(words[4])) for words in lines}


def compressed(c, shape):
    n, m = shape[0], math.prod(shape) // shape[0]
    return (n + m) * min(n, m, c["rank"]) * c["rate"] < n * m


def compare(c, ranks, theirs, ours):
    """What differs, in words, and how far from the exact average tensors that are not compressed are, Python's and
    lockstep's."""
    found, python_error, own_error, python_nan = [], 0.0, 0.0, True
    # Python's errors of what is not compressed start with the second step that compresses.
    loose = c["hook"] == "power_sgd" and c["feedback"]
    for rank in range(ranks):
        expected, actual = (torch.frombuffer(bytearray(open(f"{folder}/{c['name']}.{rank}", "rb").read()),
                                             dtype=torch.int32) for folder in (theirs, ours))  # fmt: skip
        if expected.shape != actual.shape:
            return [f"rank {rank}: {len(actual)} words instead of {len(expected)}"], 0.0, 0.0, False
        offset = 0
        for step in range(c["steps"]):
            inputs = [gradients_of(c, r, step) for r in range(ranks)]
            for b, shapes in enumerate(c["plan"]):
                exact = sum(flats[b].double() for flats in inputs) / ranks
                at = 0
                for shape in shapes:
                    length = math.prod(shape)
                    one, other = (words[offset : offset + length] for words in (expected, actual))
                    if loose and step >= c["start"] and not compressed(c, shape):
                        one, other = one.view(torch.float32), other.view(torch.float32)
                        truth, scale = exact[at : at + length], exact.abs().max()
                        python_error = max(python_error, ((one - truth).abs().max() / scale).item())
                        own_error = max(own_error, ((other - truth).abs().max() / scale).item())
                    elif c["zeros"] is not None and step >= c["zeros"]:
                        # Python divides zero by the length of a column of zeros.
                        one, other = one.view(torch.float32), other.view(torch.float32)
                        python_nan = python_nan and bool(one.isnan().all())
                        if bool(other.any()) != (step > c["zeros"]) or not bool(other.isfinite().all()):
                            found.append(f"zeros at step {c['zeros']} make {other[0]} at step {step}")
                    elif not one.equal(other):
                        wrong = int((one != other).sum())
                        first = one.view(torch.float32)[one != other][0], other.view(torch.float32)[one != other][0]
                        found.append(f"{wrong} of {length} words differ at step {step} in bucket {b} on rank {rank}, "
                                     f"as {first[0]:.9g} and {first[1]:.9g}")  # fmt: skip
                    offset += length
                    at += length
    return found, python_error, own_error, python_nan


def print_tables(results):
    print("\n| behaviour | Python | lockstep | bytes of rank 0, Python's first where they differ |\n|---|---|---|---|")
    for c in CASES:
        ranks, found, sent, python_errors, own_errors, python_nan, *_ = zip(*results[c["name"]])
        python, own = f"{c['steps']} steps at {', '.join(map(str, ranks))} ranks", "OTHER BITS" if any(found) else "same bits"
        if c["hook"] == "power_sgd" and c["feedback"]:
            python += f"; not compressed: up to {max(python_errors):.0e} from the exact average"
            own += f"; not compressed: up to {max(own_errors):.0e}"
        if c["zeros"] is not None:
            python += f"; after a gradient of zeros {'not-a-number' if all(python_nan) else 'a number'}"
            own += "; after a gradient of zeros a number"
        print(f"| {c['name']} | {python} | {own} | {' / '.join(sorted(set(map(str, sent))))} |")
    print("\nnote: Milliseconds that a bucket of 1 MiB takes in this run, the median of rank 0:")
    print("\n| hook | ranks | Python, ms | lockstep, ms |\n|---|---|---|---|")
    for c in CASES:
        for ranks, *_, python_time, own_time in results[c["name"]] if c["plan"] is TIMED else []:
            print(f"| {c['name']} | {ranks} | {python_time:.2f} | {own_time:.2f} |")


def main():
    program, sizes = sys.argv[1], [int(word) for word in sys.argv[2:]] or [2, 3, 4]
    require_same_library(program)
    failures = 0
    results = {c["name"]: [] for c in CASES}
    with tempfile.TemporaryDirectory(prefix="lockstep-hooks-") as folder:
        os.makedirs(f"{folder}/in")
        # Before this process runs operators itself.
        for ranks in sizes:
            run_python(ranks, reduce_all, f"{folder}/python-{ranks}")
        for ranks in sizes:
            write_inputs(f"{folder}/in", ranks)
            theirs, ours = f"{folder}/python-{ranks}", f"{folder}/lockstep-{ranks}"
            measured = run_lockstep(program, ranks, f"{folder}/in", ours)
            for c in CASES:
                found, python_error, own_error, python_nan = compare(c, ranks, theirs, ours)
                if own_error > TOLERANCE:
                    found.append(f"what is not compressed is {own_error:.0e} from the exact average")
                failures += bool(found)
                sent, own_time = measured[c["name"]]
                python_time, python_sent = open(f"{theirs}/{c['name']}.ms").read().split()
                python_time = float(python_time)
                print(f"{ranks} ranks, {c['name']}:", found[0] if found else "equal bits", flush=True)
                sent = f"{python_sent}, {sent}" if int(python_sent) != sent else sent
                results[c["name"]].append((ranks, found, sent, python_error, own_error, python_nan, python_time, own_time))
            if ranks != sizes[0]:
                continue
            broken = f"{folder}/broken"
            run_lockstep(program, ranks, f"{folder}/in", broken, "break")
            unseen = [c["name"] for c in CASES if not compare(c, ranks, theirs, broken)[0]]
            failures += bool(unseen)
            print(f"broken on purpose at {ranks} ranks:", f"NOT FOUND for {unseen}" if unseen else "found for each hook")
    print_tables(results)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
