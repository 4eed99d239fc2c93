"""Does to the real Python DDP, and to lockstep, what must not be done, at two ranks, and tells what becomes of it.

usage: ddp_errors_parity.py PROGRAM

Python's ranks meet in a process group of their own for each misuse; where neither has come any further for LIMIT
seconds, they are ended. Lockstep must throw the error that is expected of it on every rank, whatever Python does. Then
its ranks are made `deaf` to the others, and this script must notice that the error does not come.
"""

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time

from parity import dist, raw, require_same_library, run_program, torch, write
import torch._dynamo  # DDP and the optimizers import it at their first use: not on a rank's time
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LIMIT, STEPS, TOGETHER = 20, 3, 9
TRAINS = "trains"


class Misuse:
    """`error`: what lockstep must throw on each rank; `key`: what its message says; `where`: in which part."""

    def __init__(self, words, error=TRAINS, key="", where=""):
        self.words, self.key, self.where = words, key, where
        self.errors = error if isinstance(error, tuple) else (error, error)


MISUSES = {
    "none": Misuse("nothing wrong, for comparison"),
    "unused-here": Misuse("a parameter without a gradient on rank 1, without a search",
                          "GradientError", "parameter 2 'two.weight'", "the backward of step 1"),
    "unused": Misuse("a parameter without a gradient on all ranks, without a search",
                     "GradientError", "parameter 2 'two.weight'", "the backward of step 1"),
    "shape": Misuse("models of other shapes", "MismatchError", "'one.weight'", "the construction"),
    "dtype": Misuse("models of other dtypes", "MismatchError", "float64", "the construction"),
    "order": Misuse("layers of one shape registered in another order on rank 1", "MismatchError", "'two.weight'", "the construction"),
    "added": Misuse("a layer added after wrapping", "UsageError", "'added.weight' was added", "the backward of step 1"),
    "frozen": Misuse("a layer frozen after wrapping", "UsageError", "'two.weight' was frozen", "the backward of step 1"),
    "all-frozen": Misuse("nothing to train", "UsageError", "without a parameter that requires grad", "the construction"),
    "fewer": Misuse("a step less on rank 1", ("PeerError", TRAINS), "rank 1 has left", "the backward of step 3"),
    "create-graph": Misuse("`create_graph=True`, for a penalty on the gradients", "GradientError", "create_graph", "the backward of step 1"),
    "throws": Misuse("rank 1 throws in the backward of step 2",
                     ("PeerError", "std::runtime_error"), "thrown inside backward", "the backward of step 2"),
    "caps": Misuse("other bucket caps on rank 1", "MismatchError", "bucket_cap_mb", "the construction"),
    "caps-search": Misuse("the same with `find_unused_parameters` on both", "MismatchError", "bucket_cap_mb", "the construction"),
    "search": Misuse("`find_unused_parameters` on rank 1 alone", "MismatchError", "find_unused_parameters", "the construction"),
    "loaded": Misuse("a model loaded on rank 1 alone after wrapping; in lockstep `check_same_parameters` each step",
                     "MismatchError", "have diverged", "the check of step 1"),
    "nan": Misuse("NaN in rank 1's loss of step 2; in lockstep under `CheckFinite`",
                  "GradientError", "rank 1 has nan", "the backward of step 2"),
    "complex": Misuse("complex parameters"),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, width=8, swapped=False):
        super().__init__()
        self.one = nn.Linear(4, width)
        for name in ("three", "two") if swapped else ("two", "three"):
            setattr(self, name, nn.Linear(width, width))
        self.last = nn.Linear(width, 2)
        self.added = None

    def forward(self, x, use_two=True):
        x = torch.tanh(self.one(x))
        if use_two:
            x = torch.tanh(self.two(x))
        x = self.last(torch.tanh(self.three(x)))
        return self.added(x) if self.added is not None else x


class Thrower(torch.autograd.Function):
    @staticmethod
    def forward(_context, x):
        return x.clone()

    @staticmethod
    def backward(_context, _gradient):
        raise ValueError("thrown inside backward")


@torch.no_grad()
def fill(model, rank):
    """As in the program: values that the name decides, other ones on every rank."""
    for i, (_, parameter) in enumerate(sorted(model.named_parameters())):
        numbers = torch.arange(parameter.numel(), dtype=torch.float64)
        parameter.copy_(torch.sin(numbers * (i + 1.0)).view_as(parameter) * 0.5 + rank)
        if parameter.is_complex():
            parameter.mul_(1 + 0.5j)


def train(misuse, rank, reached):
    """Python's side. `reached` is told how far it has come."""
    here = rank == 1
    net = Net(9 if misuse == "shape" and here else 8, misuse == "order" and here)
    net.to({"dtype": torch.float64 if here else None, "complex": torch.complex64}.get(misuse))
    fill(net, rank)
    net.requires_grad_(misuse != "all-frozen")
    options = {}
    if misuse.startswith("caps") and here:
        options["bucket_cap_mb"] = 64 / 2**20
    if misuse in ("search", "caps-search"):
        options["find_unused_parameters"] = here or misuse == "caps-search"
    reached("the construction")
    ddp = DistributedDataParallel(net, **options)
    if misuse == "added":
        net.added = nn.Linear(2, 2)
        fill(net.added, rank)
    if misuse == "frozen":
        net.two.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if misuse == "loaded" and here:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1.01)
    for step in range(1, STEPS + 1 - (misuse == "fewer" and here)):
        reached(f"the forward of step {step}")
        optimizer.zero_grad()
        inputs = torch.sin(torch.arange(20, dtype=torch.float64) * (2 * step + rank + 1)).view(5, 4)
        unused = misuse == "unused" or misuse == "unused-here" and here
        loss = ddp(inputs.to(net.one.weight.dtype), not unused).abs().pow(2).mean()
        if misuse == "throws" and here and step == 2:
            loss = Thrower.apply(loss)
        if misuse == "nan" and here and step == 2:
            loss = loss * float("nan")
        reached(f"the backward of step {step}")
        loss.backward(create_graph=misuse == "create-graph")
        if misuse == "create-graph":
            reached(f"the penalty of step {step}")
            (sum(p.grad.pow(2).sum() for p in net.parameters()) * 0.1).backward()
        optimizer.step()
    return net


def rank_of(misuse, rank, output):
    """The life of one of Python's ranks; what becomes of it goes into a file."""
    path = f"{output}/{misuse}.{rank}"
    os.dup2(os.open(f"{path}.stderr", os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    reached = lambda where: write(f"{path}.where", where.encode())
    try:
        reached("the rendezvous")
        dist.init_process_group("gloo", init_method=f"file://{output}/{misuse}.meeting", rank=rank, world_size=2)
        net = train(misuse, rank, reached)
        torch.save(dict(net.named_parameters()), f"{path}.pt")
        write(f"{path}.parameters", b"".join(map(raw, net.parameters())))
        write(path, b"ended\n")
    except Exception as error:
        where = read(f"{path}.where")
        write(path, f"error\n{where}\n{type(error).__name__}\n{first_line(str(error))}\n".encode())
    os._exit(0)  # as an error that nobody catches would end it, but without the interpreter's last words


def read(path):
    with open(path, errors="replace") as file:
        return file.read()


def time_of(path):
    return os.path.getmtime(path) if os.path.exists(path) else time.time()


def first_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def run_python(misuses, output):
    """The outcome of each misuse, by rank: a tuple (kind, where, type, message)."""
    context = multiprocessing.get_context("fork")
    found, left = {}, list(misuses)
    while left:
        now, left = left[:TOGETHER], left[TOGETHER:]
        processes = {(m, r): context.Process(target=rank_of, args=(m, r, output)) for m in now for r in range(2)}
        for process in processes.values():
            process.start()
        going = True
        while going:
            time.sleep(0.1)
            newest = {m: max(time_of(f"{output}/{m}.{r}.where") for r in range(2)) for m in now}
            going = any(p.is_alive() and time.time() - newest[m] < LIMIT for (m, _), p in processes.items())
        for (misuse, rank), process in processes.items():
            path = f"{output}/{misuse}.{rank}"
            hangs = process.is_alive()
            process.kill()
            process.join()
            if os.path.exists(path):
                outcome = (read(path).splitlines() + [""] * 3)[:4]
            elif hangs:
                outcome = ["hangs", read(f"{path}.where"), "", ""]
            else:
                said = re.search(r"what\(\): *(.*)", read(f"{path}.stderr"))
                outcome = ["killed", read(f"{path}.where"), signal.Signals(-process.exitcode).name, said[1] if said else ""]
            found.setdefault(misuse, []).append(tuple(outcome))
    return found


def run_lockstep(program, misuse, output, *mistake):
    """The same of lockstep, of one misuse."""
    os.makedirs(output)
    run_program(program, "--nproc", 2, output, misuse, *mistake, timeout=120)
    return [tuple((read(f"{output}/{misuse}.{rank}").splitlines() + [""] * 3)[:4]) for rank in range(2)]


def short(text):
    """Without what differs from run to run, and no more than tells what it is."""
    text = re.sub(r"\[[^\]]*/(\w+\.cc):\d+\] *", "", text)  # where in Gloo
    text = re.sub(r"\. This is typically caused by.*", "", text)
    text = re.sub(r" *\[?(\d+\.){3}\d+\]?:\d+", "", text).replace("|", "/").strip()
    return text if len(text) <= 140 else text[:140].rsplit(" ", 1)[0] + " ..."


def tell(kind, where, error, message):
    """What became of a rank."""
    return {
        "ended": "comes to its end",
        "hangs": f"hangs in {where} (killed after {LIMIT} s)",
        "killed": f"dies of {error} in {where}: {short(message)}",
        "error": f"`{error.removeprefix('lockstep::')}` in {where}: {short(message)}",
    }[kind]


def apart(output, misuse):
    """How far the parameters of the two ranks are from each other, in words."""
    one, other = (torch.load(f"{output}/{misuse}.{rank}.pt") for rank in range(2))
    if not all(p.isfinite().all() for p in one.values()):
        return "trains on; the parameters are not finite any more"
    far = {name: (torch.linalg.norm(other[name] - p) / torch.linalg.norm(p)).item() for name, p in one.items()}
    name = max(far, key=far.get)
    if far[name] == 0:
        right = read_bytes(f"{output}/{misuse}.0.parameters") == read_bytes(f"{output}/none.0.parameters")
        return "trains as if nothing were wrong" if right and misuse != "none" else "trains; the ranks' parameters are equal"
    return f"trains on; the ranks' parameters differ, `{name}` by {far[name]:.2g} of its norm"


def in_words(outcomes, if_ended):
    if all(kind == "ended" for kind, *_ in outcomes):
        return if_ended()
    first, second = (tell(*outcome) for outcome in outcomes)
    return f"both ranks: {first}" if first == second else f"rank 0: {first}; rank 1: {second}"


def as_expected(misuse, outcomes):
    wanted = MISUSES[misuse]
    for (kind, where, error, message), expected in zip(outcomes, wanted.errors):
        if expected == TRAINS:
            if kind != "ended":
                return False
        elif (error.removeprefix("lockstep::"), where) != (expected, wanted.where) or wanted.key not in message:
            return False
    return True


def compare_trained(misuse, theirs, ours, python_ended):
    """What lockstep trained is what Python did, or where that does not, what is right."""
    mine = [read_bytes(f"{ours}/{misuse}.{rank}.parameters") for rank in range(2)]
    if mine[0] != mine[1]:
        return False, "trains, but the RANKS' PARAMETERS DIFFER"
    if python_ended:
        same = mine[0] == read_bytes(f"{theirs}/{misuse}.0.parameters")
        return same, "trains; same bits" if same else "trains, but to OTHER BITS"
    return True, "trains; the ranks' parameters are equal"


def main():
    program = sys.argv[1]
    require_same_library(program)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-errors-") as folder:
        theirs = f"{folder}/python"
        os.makedirs(theirs)
        python = run_python(MISUSES, theirs)
        print("| misuse, at two ranks | Python | lockstep |\n|---|---|---|", flush=True)
        for misuse in MISUSES:
            ours = f"{folder}/lockstep-{misuse}"
            outcomes = run_lockstep(program, misuse, ours)
            right = as_expected(misuse, outcomes)
            if right and MISUSES[misuse].errors[0] == TRAINS:
                ended = all(kind == "ended" for kind, *_ in python[misuse])
                right, text = compare_trained(misuse, theirs, ours, ended)
            else:
                text = in_words(outcomes, lambda: "trains on")
            failures += not right
            print(f"| {MISUSES[misuse].words} | {in_words(python[misuse], lambda: apart(theirs, misuse))} | "
                  f"{text}{'' if right else ' NOT AS EXPECTED'} |", flush=True)  # fmt: skip
        for misuse in ("order", "loaded"):
            broken = run_lockstep(program, misuse, f"{folder}/deaf-{misuse}", "deaf")
            found = not as_expected(misuse, broken)
            failures += not found
            print(f"broken on purpose (ranks that believe all others to be as they are), {misuse}: "
                  f"{'found' if found else 'NOT FOUND'}")  # fmt: skip
    sys.exit(f"{failures} of them were not as expected" if failures else 0)


if __name__ == "__main__":
    main()
