"""Continues a checkpoint of lockstep in Python's DDP and one of Python's in lockstep, on the same data, and compares the next
losses and the final models and optimizer states bit for bit with those of the run that was not interrupted.

usage: interchange_parity.py PROGRAM [RANKS...]

The safetensors files are compared with the safetensors package where it is installed. Afterwards lockstep is broken on purpose,
and the comparison must find each way.
"""

import os
import sys
import tempfile

from parity import raw, require_same_library, run_forked, run_program, run_python, torch, write

from torch import nn

SAVED, STEPS, BATCH = 4, 9, 6
CASES = {
    "sgd": "SGD, Nesterov momentum and weight decay",
    "adam": "Adam, `amsgrad=True`",
    "adamw": "AdamW, two groups in another order than the parameters",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(nn.Linear(8 * 36, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x):
        return self.layers(torch.relu(self.bn(self.conv(x))).flatten(1))


def make_optimizer(name, parameters):
    p = list(parameters)
    if name == "sgd":
        return torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)
    if name == "adam":
        return torch.optim.Adam(p, lr=0.01, amsgrad=True)
    return torch.optim.AdamW([dict(params=[p[4], p[6]], lr=0.02, weight_decay=0.1),
                              dict(params=[p[i] for i in (0, 1, 2, 3, 5, 7)], lr=0.01, betas=(0.8, 0.99), weight_decay=0.0)])


def train(rank, ranks, scratch, folder, case, source, first, half, last, output):
    """Writes what interchange_program writes."""
    output = f"{folder}/{output}"
    data = torch.load(f"{folder}/data.pt", weights_only=True)
    saved = torch.load(f"{folder}/{source}", weights_only=True)
    model = Net()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(case, ddp.parameters())
    of = ddp if next(iter(saved["model"])).startswith("module.") else model
    of.load_state_dict(saved["model"])  # strict: all names and shapes
    if "optimizer" in saved:
        optimizer.load_state_dict(saved["optimizer"])
    save = lambda name, step: torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{name}.pt")
    losses = []
    for step in range(first, last):
        if step == half and rank == 0:
            save(f"{output}-half", step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(data["inputs"][step][rank]), data["targets"][step][rank])
        loss.backward()
        optimizer.step()
        losses.append(raw(loss))
    write(f"{output}.{rank}", b"".join(losses))
    if rank == 0:
        save(output, last)


def write_inputs(folder, ranks):
    torch.manual_seed(3407)
    torch.save({"inputs": torch.randn(STEPS, ranks, BATCH, 3, 6, 6), "targets": torch.randint(0, 5, (STEPS, ranks, BATCH))},
               f"{folder}/data.pt")
    torch.save({"model": Net().state_dict()}, f"{folder}/initial.pt")


def result(folder, name, ranks):
    """Losses of each rank from SAVED on, model and optimizer of a run."""
    losses = []
    for rank in range(ranks):
        with open(f"{folder}/{name}.{rank}", "rb") as file:
            losses.append(file.read()[-4 * (STEPS - SAVED):])
    return losses, torch.load(f"{folder}/{name}.pt", weights_only=True)


def difference(ours, theirs):
    """What differs between two results; an empty string if no bit does."""
    if ours[0] != theirs[0]:
        return "the losses"
    for key in ("model", "optimizer"):
        if flat(without_prefix(ours[1][key])) != flat(without_prefix(theirs[1][key])):
            return f"the {key}"
    return ""


def without_prefix(state):
    """Names as those of the model that DistributedDataParallel wraps."""
    return {key.removeprefix("module.") if isinstance(key, str) else key: value for key, value in state.items()}


def flat(value, place=""):
    """Each number and tensor of a state dict by its place."""
    if isinstance(value, torch.Tensor):
        return {place: (value.dtype, tuple(value.shape), raw(value))}
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{place}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{place}.{i}").items()} | {place: type(value)}
    return {place: float(value) if isinstance(value, (int, float)) else value}


def compare_safetensors(folder, program, ranks):
    """The real package reads what lockstep writes, and the reverse."""
    try:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file
    except ImportError:
        print("SKIPPED in part: no Python package safetensors (pip install safetensors): its files are not compared")
        return 0
    saved = torch.load(f"{folder}/cpp-half.pt", weights_only=True)["model"]
    read = load_file(f"{folder}/cpp-half.safetensors")
    with safe_open(f"{folder}/cpp-half.safetensors", "pt") as file:
        metadata = file.metadata()
    right = metadata == {"format": "pt"} and flat({f"module.{k}": v for k, v in read.items()}) == flat(saved)
    print(f"| a model of lockstep | `safetensors.torch.load_file` | {'same bits' if right else 'DIFFERS'} |")
    save_file(read, f"{folder}/python.safetensors", {"format": "pt"})
    run_program(program, "--nproc", ranks, folder, "sgd", "python.safetensors", 0, 0, 0, "again")
    with open(f"{folder}/cpp-half.safetensors", "rb") as one, open(f"{folder}/again.safetensors", "rb") as other:
        same = one.read() == other.read()
    print(f"| `safetensors.torch.save_file` | a model loaded by lockstep | {'same bits' if same else 'DIFFERS'} |")
    return (not right) + (not same)


def compare_trainer(folder, ours, theirs, case, ranks):
    """A Trainer's file of state dicts continues in Python's DDP, and Python's file in a Trainer."""
    ours("initial.pt", 0, SAVED, STEPS, "trainer", "trainer")
    theirs("trainer-half.pt", SAVED, 0, STEPS, "trainer-to-py")
    ours("py-half.pt", SAVED, 0, STEPS, "py-to-trainer", "trainer")
    saved = torch.load(f"{folder}/trainer-half.pt", weights_only=True)
    failures = saved.keys() != {"model", "optimizer", "epoch", "step"} or (saved["epoch"], saved["step"]) != (1, SAVED)
    after = f"{STEPS - SAVED} steps | same bits as without the change"
    for name, whole, words in (("trainer", "cpp", f"{STEPS} steps of a Trainer at {ranks} ranks | (lockstep by hand) | same bits"),
                               ("trainer-to-py", "trainer", f"{SAVED} steps of a Trainer at {ranks} ranks | Python, {after}"),
                               ("py-to-trainer", "py", f"{SAVED} steps of Python at {ranks} ranks | a Trainer, {after}")):
        what = difference(result(folder, name, ranks), result(folder, whole, ranks))
        failures += bool(what)
        print(f"| {CASES[case]}: {words.rpartition(' | ')[0] + f' | DIFFERS: {what}' if what else words} |", flush=True)
    return failures


def compare_scaler(folder, program):
    """The state of a GradScaler of Python's, through lockstep and back."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 5})
    torch.save(scaler.state_dict(), f"{folder}/scaler.pt")
    run_program(program, "--nproc", 1, folder, "scaler", "scaler.pt", "scaler-back.pt")
    back = torch.load(f"{folder}/scaler-back.pt", weights_only=True)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(back)
    same = back == scaler.state_dict() == other.state_dict()
    print(f"| a GradScaler of Python | lockstep and back | {'same values' if same else 'DIFFERS'} |")
    return not same


def main():
    program = sys.argv[1]
    require_same_library(program)
    failures = 0
    print("| behaviour | continued by | losses, model and optimizer |\n|---|---|---|")
    for ranks in [int(word) for word in sys.argv[2:]] or [2]:
        for case, words in CASES.items():
            with tempfile.TemporaryDirectory(prefix="lockstep-interchange-") as folder:
                run_forked(write_inputs, folder, ranks)
                ours = lambda *words: run_program(program, "--nproc", ranks, folder, case, *words)
                count = iter(range(100))

                def theirs(*words):
                    scratch = f"{folder}/python-{next(count)}"
                    run_python(ranks, train, scratch, folder, case, *words)

                ours("initial.pt", 0, SAVED, STEPS, "cpp")
                theirs("initial.pt", 0, SAVED, STEPS, "py")
                theirs("cpp-half.pt", SAVED, 0, STEPS, "cpp-to-py")
                ours("py-half.pt", SAVED, 0, STEPS, "py-to-cpp")
                for name, whole, by in (("cpp-to-py", "cpp", "Python"), ("py-to-cpp", "py", "lockstep")):
                    what = difference(result(folder, name, ranks), result(folder, whole, ranks))
                    failures += bool(what)
                    origin = "lockstep" if by == "Python" else "Python"
                    print(f"| {words}: {SAVED} steps of {origin} at {ranks} ranks | {by}, {STEPS - SAVED} steps | "
                          f"{f'DIFFERS: {what}' if what else 'same bits as without the change'} |", flush=True)
                if case == "sgd":
                    failures += compare_safetensors(folder, program, ranks) + compare_scaler(folder, program)
                if case == "adamw":
                    failures += compare_trainer(folder, ours, theirs, case, ranks)
                for mistake in ("forgotten", "swapped") if case == "sgd" and ranks == 2 else ():
                    ours("py-half.pt", SAVED, 0, STEPS, "broken", mistake)
                    found = difference(result(folder, "broken", ranks), result(folder, "py", ranks)) == "the losses"
                    failures += not found
                    print(f"broken on purpose ({mistake}), {case}: {'found' if found else 'NOT FOUND'}")
    if failures:
        sys.exit(f"{failures} comparisons failed")


if __name__ == "__main__":
    main()
