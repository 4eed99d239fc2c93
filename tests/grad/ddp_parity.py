"""Trains with the real Python DistributedDataParallel and with lockstep from the same state and data, and compares
parameters and buffers of every rank bit for bit, after the first step (before buckets are rebuilt), the second, and
the last.

usage: ddp_parity.py PROGRAM [RANKS...]

Afterwards lockstep is broken on purpose, and the comparison must find each way.
"""

import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["OMP_NUM_THREADS"] = "1"

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    print(f"SKIPPED DDP parity: no torch package ({error})")
    sys.exit(77)

BATCH = 30
SHAPES = {"mlp": (64,), "big": (512,), "convnet": (1, 12, 12)}
BATCHES = {"mlp": 600, "big": 48, "convnet": 200}

# name, model, zero_grad(set_to_none), micro batches (all but the last under no_sync), steps, rate, momentum, cap in
# bytes (0: the default caps)
CASES = [
    ("plain-none", "mlp", 1, 1, 50, 0.1, 0.0, 16384),
    ("momentum-zero", "mlp", 0, 1, 50, 0.05, 0.9, 16384),
    ("accumulate-none", "mlp", 1, 3, 50, 0.05, 0.9, 16384),
    ("accumulate-zero", "mlp", 0, 3, 50, 0.1, 0.0, 16384),
    ("convnet-none", "convnet", 1, 1, 50, 0.05, 0.9, 8192),
    ("convnet-zero", "convnet", 0, 1, 50, 0.1, 0.0, 8192),
    ("default-caps", "big", 0, 1, 8, 0.05, 0.9, 0),
]


def make_model(name):
    from torch import nn

    if name == "mlp":
        return nn.Sequential(
            nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10)
        )
    if name == "big":
        return nn.Sequential(
            nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
            nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(288, 10),
    )  # fmt: skip


def state_bytes(model):
    tensors = itertools.chain(model.parameters(), model.buffers())
    return b"".join(bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()) for tensor in tensors)


def write(path, content):
    with open(path, "wb") as file:
        file.write(content)


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write_inputs(folder):
    for name, shape in SHAPES.items():
        torch.manual_seed(len(name))
        write(f"{folder}/{name}.state", state_bytes(make_model(name)))
        inputs = torch.randn(BATCHES[name], BATCH, *shape)
        labels = torch.randint(10, (BATCHES[name], BATCH))
        write(f"{folder}/{name}.inputs", raw(inputs))
        write(f"{folder}/{name}.labels", raw(labels))


def write_cases(folder, cases):
    with open(f"{folder}/cases", "w") as file:
        for case in cases:
            print(*case, file=file)


def train(case, rank, folder, output):
    name, model_name, set_to_none, micro_batches, steps, rate, momentum, cap = case
    torch.manual_seed(len(model_name))
    model = make_model(model_name)
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.add_(rank)
    read = lambda end, dtype: torch.frombuffer(bytearray(open(f"{folder}/{model_name}.{end}", "rb").read()), dtype=dtype)
    x = read("inputs", torch.float32).view(BATCHES[model_name], BATCH, *SHAPES[model_name])
    y = read("labels", torch.int64).view(BATCHES[model_name], BATCH)
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap / 2**20 if cap else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate, momentum=momentum)

    def backward(step, micro):
        batch = ((step * micro_batches + micro) * 4 + rank) % len(y)
        torch.nn.functional.cross_entropy(ddp(x[batch]), y[batch]).backward()

    for step in range(steps):
        optimizer.zero_grad(set_to_none=bool(set_to_none))
        with ddp.no_sync():
            for micro in range(micro_batches - 1):
                backward(step, micro)
        backward(step, micro_batches - 1)
        optimizer.step()
        if step < 2 or step + 1 == steps:
            write(f"{output}/{name}.{step + 1}.{rank}", state_bytes(model))


def worker(rank, ranks, folder, output):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}/rendezvous", rank=rank, world_size=ranks)
    for case in CASES:
        train(case, rank, folder, output)
    dist.destroy_process_group()


def run_python(ranks, folder, output):
    os.makedirs(output)
    # fork: the torch package is imported once
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=worker, args=(r, ranks, folder, output)) for r in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("the Python side failed")


def run_lockstep(program, ranks, folder, output, mutation=()):
    os.makedirs(output)
    result = subprocess.run(
        [program, "--nproc", str(ranks), folder, output, *mutation], capture_output=True, text=True, timeout=300
    )
    if result.returncode:
        sys.exit(f"{program} failed at {ranks} ranks:\n{result.stdout}{result.stderr}")
    return {line.split()[0]: int(line.split()[-1]) for line in result.stdout.splitlines() if " buckets " in line}


def differences(case, ranks, theirs, ours):
    """The steps and ranks whose states differ, in words."""
    name, steps = case[0], case[4]
    for step, rank in itertools.product(sorted({1, min(2, steps), steps}), range(ranks)):
        expected = open(f"{theirs}/{name}.{step}.{rank}", "rb").read()
        actual = open(f"{ours}/{name}.{step}.{rank}", "rb").read()
        if expected != actual:
            wrong = sum(expected[i : i + 4] != actual[i : i + 4] for i in range(0, len(expected), 4))
            yield f"{name}: {wrong} of {len(expected) // 4} words differ at step {step} on rank {rank} of {ranks}"


def main():
    program, sizes = sys.argv[1], [int(word) for word in sys.argv[2:]] or [2, 3, 4]
    library = subprocess.run([program, "--library"], capture_output=True, text=True).stdout.strip()
    own = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    if os.path.realpath(library) != os.path.realpath(own):
        print(f"SKIPPED DDP parity: the program loads {library}, the Python package {own}; their bits may differ")
        sys.exit(77)

    folder = tempfile.mkdtemp(prefix="lockstep-parity-")
    failures = 0
    try:
        os.makedirs(f"{folder}/in")
        # In a process of its own: one that has run operators should not fork.
        writer = multiprocessing.get_context("fork").Process(target=write_inputs, args=(f"{folder}/in",))
        writer.start()
        writer.join()
        for ranks in sizes:
            start = time.monotonic()
            theirs, ours = f"{folder}/python-{ranks}", f"{folder}/lockstep-{ranks}"
            write_cases(f"{folder}/in", CASES)
            run_python(ranks, f"{folder}/in", theirs)
            middle = time.monotonic()
            buckets = run_lockstep(program, ranks, f"{folder}/in", ours)
            for case in CASES:
                found = list(differences(case, ranks, theirs, ours))
                failures += bool(found)
                print(f"{ranks} ranks, {case[0]}, {buckets[case[0]]} buckets, {case[4]} steps:",
                      found[0] if found else "equal bits")  # fmt: skip
                if buckets[case[0]] < 3:
                    failures += 1
                    print("  that is fewer than three buckets")
            print(f"{ranks} ranks: Python {middle - start:.1f} s, lockstep {time.monotonic() - middle:.1f} s", flush=True)
            # The comparison finds what is broken. At two ranks an order changes no bit: a + b = b + a.
            write_cases(f"{folder}/in", CASES[:1])
            for mutation in ("off", "skip", "permute"):
                if ranks != (3 if mutation == "permute" else sizes[0]):
                    continue
                broken = f"{folder}/{mutation}"
                run_lockstep(program, ranks, f"{folder}/in", broken, [mutation])
                found = list(differences(CASES[0], ranks, theirs, broken))
                failures += not found
                print(f"{ranks} ranks, broken by {mutation}:", found[0] if found else "NOT FOUND", flush=True)
            shutil.rmtree(theirs)
    finally:
        shutil.rmtree(folder)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
