"""CPU time of the example programs and of their Python originals: the same data, seed, ranks and steps.

examples.py FOLDER_OF_PROGRAMS SHARED_FOLDER [--rounds 3] [--only NAME ...] [--write docs/benchmarks.md]
examples.py FOLDER_OF_PROGRAMS --defaults [--limit 60] [--only NAME ...] [--write docs/benchmarks.md]

The first command is to be run by the Python that has the torch package of the programs. The shared folder holds data/mnist and
data/tinyshakespeare.txt. Both sides run in turn, 2 Gloo ranks of one thread (single_gpu and origin_main: one process). Python refuses
SyncBatchNorm on CPUs; ddp_main's counterpart has a layer written in Python (tests/examples/mnist_parity.py). ddp_toy draws model and
data without a seed, on both sides. A figure is the user CPU time of all processes of a run, which tells more than wall time on a busy
machine.
"run" is the time of the long run, starting included; "training" is that time without the time of the short run, which leaves the
steps between. The ratio is lockstep's time over Python's: the median over the rounds, with the smallest and the largest.

The second command runs each program of examples/README.md with its defaults on two cores, as a new user does: on CPUs, without data
and with an empty cache. It names the programs that take longer than the limit, and ends with 1 if there are any. Run it on a machine that
does nothing else: where OpenMP's threads wait for a core, a program takes many times as long.
"""
import argparse
import importlib.metadata
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
import record

RANKS = 2
HERE = os.path.dirname(os.path.abspath(__file__))
for part in ("../tests/support", "../tests/examples"):
    sys.path.insert(0, os.path.join(HERE, part))

# Each example: the units of the short run (None: the example has only one) and of the long run, a unit's name, and what it is.
EXAMPLES = {
    "ddp_gpus": (5, 85, "epoch", " of 32 steps, batch 32"),
    "single_gpu": (5, 45, "epoch", " of 64 steps, batch 32, one process"),
    "multigpu": (5, 85, "epoch", " of 32 steps, batch 32"),
    "multigpu_torchrun": (5, 85, "epoch", " of 32 steps, batch 32, with momentum"),
    "ddp_toy": (None, 1, "step", " of the demo basic, batch 20"),
    "average_gradients": (1, 2, "epoch", " of 40 steps, batch 100"),
    "ring_all_reduce": (1, 31, "million element", ", by the ring and by all_reduce"),
    "mnist": (1, 2, "epoch", " of 125 steps, batch 32"),
    "origin_main": (1, 2, "epoch", " of 125 steps, batch 32, one process"),
    "ddp_main": (1, 2, "epoch", " of 63 steps, batch 32, SyncBatchNorm"),
    "imagenet": (1, 2, "epoch", " of 20 steps, batch 16, and a validation"),
    "mingpt": (10, 40, "step", ", batch 16, block 64"),
}  # fmt: skip
# Arguments without which a program does not run: the tutorials' own, and CPUs in place of ddp_toy's GPUs.
REQUIRED = {
    "single_gpu": ["50", "10"],
    "multigpu": ["50", "10"],
    "multigpu_torchrun": ["50", "10"],
    "ddp_toy": ["--cpu-devices", "4"],
}
DEFAULTS_HEAD = "| program with its defaults | wall time | CPU time |"
HEAD = "| example | training | lockstep | Python | ratio | run | lockstep | Python | ratio |"
ONE_PROCESS = "single_gpu", "origin_main"
FEWER_DIGITS = 4000  # of average_gradients, origin_main and ddp_main


def count(number, unit):
    return f"{'an' if unit[0] in 'aeiou' else 'a'} {unit}" if number == 1 else f"{number} {unit}s"


def text_for(scratch, shared, steps):
    """The beginning of tiny Shakespeare that makes `steps` steps in two epochs."""
    with open(os.path.join(shared, "data", "tinyshakespeare.txt"), encoding="utf-8") as file:
        text = file.read()[: steps // 2 * RANKS * 16 + 64]
    path = os.path.join(scratch, f"text{steps}.txt")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def lockstep_command(name, folder, shared, units, scratch):
    digits = ["--data-dir", os.path.join(shared, "data", "mnist")]
    gpt = {"gpt_config.n_layer": 4, "gpt_config.n_head": 4, "gpt_config.n_embd": 128, "gpt_config.embd_pdrop": 0,
           "gpt_config.resid_pdrop": 0, "gpt_config.attn_pdrop": 0, "data_config.block_size": 64,
           "data_config.train_split": 1, "trainer_config.batch_size": 16, "trainer_config.max_epochs": 2,
           "trainer_config.save_every": 2, "trainer_config.seed": 3407, "trainer_config.grad_norm_clip": 1.0,
           "trainer_config.snapshot_path": f"{scratch}/snapshot.pt", "optimizer_config.learning_rate": 3e-4,
           "optimizer_config.weight_decay": 0.1, "sample_config.number": 0}
    arguments = {
        "ddp_gpus": lambda: ["--max_epochs", str(units)],
        "single_gpu": lambda: [str(units), str(units)],
        "ddp_toy": lambda: ["basic"],
        "ring_all_reduce": lambda: ["--elements", str(units * 1_000_000)],
        "multigpu": lambda: [str(units), str(units)],
        "multigpu_torchrun": lambda: [str(units), str(units), "--momentum", "0.9"],
        "average_gradients": lambda: ["--epochs", str(units), "--samples", str(FEWER_DIGITS), *digits],
        "mnist": lambda: ["--epochs", str(units), "--lr", "0.02", "--sync-batchnorm", "off", *digits],
        "origin_main": lambda: ["--epochs", str(units), "--samples", str(FEWER_DIGITS), *digits],
        "ddp_main": lambda: ["--epochs", str(units), "--samples", str(FEWER_DIGITS), *digits],
        "imagenet": lambda: ["--epochs", str(units), "--seed", "7", "--workers", "0", "--save-dir", scratch],
        "mingpt": lambda: ["--data-path", text_for(scratch, shared, units), *(f"{key}={value}" for key, value in gpt.items())],
    }
    ranks = [] if name in ONE_PROCESS else ["--nproc", str(RANKS)]
    return [os.path.join(folder, name), *ranks, *arguments[name]()]


def python_rank(rank, name, units, scratch, shared):
    """A rank of the Python original. Models and data are those of the comparisons in tests/examples."""
    sys.argv = [name, name, shared]  # what those scripts read when they are imported
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks = 1 if name in ONE_PROCESS else RANKS
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/meet", rank=rank, world_size=ranks)
    if name == "ring_all_reduce":
        sum_by_ring(rank, units * 1_000_000)
    elif name == "ddp_toy":
        step_of_toy_model()
    else:
        train(rank, ranks, name, units, scratch, shared)
    if ranks > 1:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # an interpreter that finalizes beside threads of a process group aborts now and then


def sum_by_ring(rank, elements):
    """What ring_all_reduce does: reduce-scatter and all-gather by messages, then the comparison with all_reduce."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(1 + rank)
    tensor = torch.randn(elements)
    reference = tensor.clone()
    chunks = tensor.tensor_split(RANKS)

    def exchange(sent, received):
        sending = dist.isend(sent, (rank + 1) % RANKS)
        dist.recv(received, (rank - 1) % RANKS)
        sending.wait()

    for step in range(RANKS - 1):
        chunk = chunks[(rank - step - 1) % RANKS]
        received = torch.empty_like(chunk)
        exchange(chunks[(rank - step) % RANKS], received)
        chunk += received
    for step in range(RANKS - 1):
        exchange(chunks[(rank + 1 - step) % RANKS], chunks[(rank - step) % RANKS])
    dist.all_reduce(reference)
    if not torch.allclose(tensor, reference, rtol=1e-5, atol=1e-5):
        sys.exit("the ring's sum differs from all_reduce's")


def step_of_toy_model():
    """What `ddp_toy basic` does."""
    import torch
    from torch import nn

    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()


def train(rank, ranks, name, units, scratch, shared):
    import torch
    from torch.nn.functional import cross_entropy, mse_loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, Subset

    if name in ("ddp_gpus", "single_gpu", "multigpu", "multigpu_torchrun"):
        from multigpu_parity import begin
        data, model = begin(torch.randn if name == "ddp_gpus" else torch.rand)
        momentum = 0.9 if name == "multigpu_torchrun" else 0
        loss_of, optimizer, batch, seed = mse_loss, torch.optim.SGD(model.parameters(), 1e-3, momentum), 32, 0
    elif name in ("origin_main", "ddp_main"):
        from mnist_parity import Digits, template_net
        data, model = Subset(Digits("train"), range(FEWER_DIGITS)), template_net(ranks > 1)
        loss_of, batch, seed = cross_entropy, 32, 0
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    elif name in ("mnist", "average_gradients"):
        from average_gradients_parity import average_gradients
        from mnist_parity import ConvNet, Digits
        torch.manual_seed(3407 if name == "mnist" else 0)
        data = Digits("train") if name == "mnist" else Subset(Digits("train"), range(FEWER_DIGITS))
        model, loss_of = ConvNet(), cross_entropy
        batch, seed = (32, 3407) if name == "mnist" else (100, 0)
        rate = dict(lr=0.02) if name == "mnist" else dict(lr=0.001, momentum=0.9)
        optimizer = torch.optim.SGD(model.parameters(), **rate)
        if name == "average_gradients":
            torch.manual_seed(rank)  # each rank has an order of the digits of its own
    elif name == "imagenet":
        import imagenet_parity
        data, validation = imagenet_parity.dummy_images("train"), imagenet_parity.dummy_images("val")
        torch.manual_seed(7)
        model, loss_of, batch, seed = imagenet_parity.new_model("resnet18", 1000), cross_entropy, 16, 7
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    else:
        from mingpt_parity import Characters, Gpt, decay_groups
        data = Characters(text_for(scratch, shared, units), 64)
        torch.manual_seed(3407)
        model = Gpt(data.characters, 64, 4, 4, 128, 0.0)
        optimizer, batch, seed = torch.optim.AdamW(decay_groups(model), lr=3e-4, betas=(0.9, 0.95)), 16, 3407
        loss_of = lambda outputs, targets: cross_entropy(outputs.flatten(0, 1), targets.flatten())

    if name in (*ONE_PROCESS, "average_gradients"):  # without DistributedDataParallel: every rank sees all samples
        forward, sampler = model, None
        loader = DataLoader(data, batch, shuffle=True)
    else:
        forward, sampler = DistributedDataParallel(model), DistributedSampler(data, seed=seed)
        loader = DataLoader(data, batch, sampler=sampler)

    def top_5(outputs, targets):
        hits = outputs.topk(5).indices == targets.view(-1, 1)
        return hits[:, 0].sum().item(), hits.sum().item()

    for epoch in range(2 if name == "mingpt" else units):
        if sampler:
            sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = forward(inputs)
            loss = loss_of(outputs, targets)
            loss.backward()
            if name == "average_gradients":
                loss.item(), (outputs.argmax(1) == targets).sum().item()
                average_gradients(model, ranks)
            elif name == "imagenet":
                loss.item(), top_5(outputs, targets)
            elif name == "mingpt":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if name == "imagenet":
            model.eval()
            with torch.no_grad():
                for inputs, targets in DataLoader(validation, batch, sampler=range(rank, len(validation), ranks)):
                    outputs = model(inputs)
                    loss_of(outputs, targets).item(), top_5(outputs, targets)
            if rank == 0:
                torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{scratch}/checkpoint.pt")
    if name in ("mnist", "origin_main", "ddp_main"):
        model.eval()
        test = Digits("t10k")
        with torch.no_grad():
            for inputs, targets in DataLoader(test, batch, sampler=range(rank, len(test), ranks)):
                model(inputs)
    if rank == 0 and name == "multigpu_torchrun":
        snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": units}
        torch.save(snapshot, f"{scratch}/snapshot.pt")


def user_seconds(command, scratch):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCKSTEP_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def measure(name, folder, shared):
    """The user seconds of the short and of the long run, of each side."""
    sides = {}
    for side in ("lockstep", "Python"):
        sides[side] = []
        for units in EXAMPLES[name][:2]:
            if units is None:
                sides[side].append(None)
                continue
            with tempfile.TemporaryDirectory() as scratch:
                command = lockstep_command(name, folder, shared, units, scratch)
                if side == "Python":
                    command = [sys.executable, os.path.abspath(__file__), folder, shared, "--python", name, str(units), scratch]
                sides[side].append(user_seconds(command, scratch))
    return sides


def cells(what, rounds, seconds):
    """Four cells of a row: what was timed, both sides' medians, and the ratio."""
    ours, theirs = ([seconds(each[side]) for each in rounds] for side in ("lockstep", "Python"))
    ratios = sorted(a / b for a, b in zip(ours, theirs))
    spread = f" ({ratios[0]:.2f}-{ratios[-1]:.2f})" if len(ratios) > 1 else ""
    return [what, f"{statistics.median(ours):.2f} s", f"{statistics.median(theirs):.2f} s", f"{statistics.median(ratios):.2f}{spread}"]


def programs_of_readme():
    """The names of the programs in the table of examples/README.md."""
    with open(os.path.join(HERE, "../examples/README.md"), encoding="utf-8") as file:
        rows = [line.split("|")[1] for line in file if line.startswith("| [")]
    return [name for row in rows for name in re.findall(r"\[(\w+)\.cpp\]", row)]


def run_defaults(folder, names, limit):
    """The lines of the table, and the names of the programs that take longer than `limit` seconds."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in unset and not name.startswith("LOCKSTEP_")}
    lines, slow = [DEFAULTS_HEAD, "|---|---|---|"], []
    print("\n".join(lines), flush=True)
    for name in names:
        command = [os.path.join(folder, name), *REQUIRED.get(name, [])]
        if not os.access(command[0], os.X_OK):
            sys.exit(f"{command[0]} is not built")
        with tempfile.TemporaryDirectory() as scratch:
            changed = {"XDG_CACHE_HOME": f"{scratch}/cache", "LOCKSTEP_DEVICE": "cpu"}
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            done = subprocess.run(command, cwd=scratch, env={**environment, **changed}, capture_output=True, text=True)
            wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        if wall > limit:
            slow.append(name)
        lines.append(f"| {' '.join([name, *command[1:]])} | {wall:.1f} s | {cpu:.1f} s |")
        print(lines[-1], flush=True)
    return lines, slow


def measured_how(folder, rounds=None):
    """The sentences below the table. Without `rounds`: of programs with their defaults."""
    try:
        with open(os.path.join(folder, "..", "CMakeCache.txt"), encoding="utf-8") as cache:
            kind = re.search(r"^CMAKE_BUILD_TYPE:\w+=(.+)$", cache.read(), re.M)
    except OSError:
        kind = None
    programs = f"programs of a {kind[1]} build" if kind else "programs of an unknown build type"
    measured = f"Measured on {time.strftime('%Y-%m-%d')}"
    where = f"with {programs}, on {os.cpu_count()} cores (load average at the end {os.getloadavg()[1]:.1f})."
    if rounds is None:
        return f"{measured} {where}"
    return (f"{measured} in {count(rounds, 'round')}, {where} LibTorch and torch {importlib.metadata.version('torch')}, Python "
            f"{platform.python_version()}.")


def replace_table(path, lines):
    """Replaces the table that begins as `lines` do, and the rest of its section, by `lines`."""
    with open(path, encoding="utf-8") as file:
        before, found, after = file.read().partition(lines[0])
    if not found:
        sys.exit(f"{path} has no table that begins with {lines[0]}")
    _, heading, rest = after.partition("\n## ")
    with open(path, "w", encoding="utf-8") as file:
        command = f"python3 bench/examples.py {'FOLDER_OF_PROGRAMS --defaults' if 'defaults' in lines[0] else 'FOLDER_OF_PROGRAMS SHARED_FOLDER'}"
        before = re.sub(r"<!-- record: [^\n]*\n\Z", "", before)
        mark = record.comment(f"{command} --write docs/benchmarks.md", "time, CPU")
        file.write(before + mark + "\n" + "\n".join(lines) + "\n" + heading + rest)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("shared", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--defaults", action="store_true", help="run every program with its defaults")
    parser.add_argument("--limit", type=float, default=60, help="seconds of a program with its defaults")
    parser.add_argument("--only", nargs="+", help="names of programs")
    parser.add_argument("--write", help="the file whose table it replaces")
    parser.add_argument("--python", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.python:
        import torch
        name, units, scratch = arguments.python
        ranks = 1 if name in ONE_PROCESS else RANKS
        torch.multiprocessing.spawn(python_rank, (name, int(units), scratch, arguments.shared), ranks)
        return
    names = programs_of_readme() if arguments.defaults else list(EXAMPLES)
    if unknown := set(arguments.only or []) - set(names):
        parser.error(f"--only: {', '.join(sorted(unknown))}: the programs are {', '.join(names)}")
    names = arguments.only or names
    folder = os.path.abspath(arguments.folder)
    if arguments.defaults:
        lines, slow = run_defaults(folder, names, arguments.limit)
        lines += ["", *textwrap.wrap(measured_how(folder), 135, break_on_hyphens=False)]
        print("\n".join(lines[len(names) + 2 :]))
        if arguments.write:
            replace_table(arguments.write, lines)
        if slow:
            sys.exit(f"more than {arguments.limit:g} s: {', '.join(slow)}")
        return
    if arguments.shared is None:
        parser.error("SHARED_FOLDER is missing")
    shared = os.path.abspath(arguments.shared)
    lines = [HEAD, "|---|---|---|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for name in names:
        short, long, unit, what = EXAMPLES[name]
        rounds = [measure(name, folder, shared) for _ in range(arguments.rounds)]
        training = ["-"] * 4 if short is None else cells(count(long - short, unit) + what, rounds, lambda times: times[1] - times[0])
        run = cells(count(long, unit) + (what if short is None else ""), rounds, lambda times: times[1])
        lines.append(f"| {name} | {' | '.join(training + run)} |")
        print(lines[-1], flush=True)
    lines += ["", *textwrap.wrap(measured_how(folder, arguments.rounds), 135, break_on_hyphens=False)]
    print("\n".join(lines[len(names) + 2 :]))
    if arguments.write:
        replace_table(arguments.write, lines)


if __name__ == "__main__":
    main()
