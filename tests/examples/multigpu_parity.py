"""Trains the toy regression of examples/single_gpu, examples/multigpu, examples/multigpu_torchrun and examples/ddp_gpus in Python as
well, from the same seed, and compares the bits of the saved models. multigpu_torchrun and its counterpart stop after two epochs, and
resume from their own snapshots and from each other's.

multigpu_parity.py MULTIGPU_PROGRAM SINGLE_GPU_PROGRAM MULTIGPU_TORCHRUN_PROGRAM DDP_GPUS_PROGRAM. Exit code 77: skipped.
"""
import os
import shutil
import subprocess
import sys
import tempfile

from parity import dist, run_forked, run_python, torch

EPOCHS, BATCH, MOMENTUM = 3, 32, 0.9


class MyTrainDataset(torch.utils.data.Dataset):
    def __init__(self, size, target=torch.rand):
        self.data = [(torch.rand(20), target(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def run_epochs(model, optimizer, loader, epochs, sampler=None):
    for epoch in epochs:
        if sampler:
            sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(source), targets).backward()
            optimizer.step()


def begin(target=torch.rand):
    """Data and model of all programs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return MyTrainDataset(2048, target), torch.nn.Linear(20, 1)


def train_alone(path):
    """What single_gpu does."""
    data, net = begin()
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    run_epochs(net, torch.optim.SGD(net.parameters(), 1e-3), loader, range(EPOCHS))
    torch.save(net.state_dict(), path)


def train(rank, size, output, target=torch.rand):
    """What multigpu does, and with targets by torch.randn what ddp_gpus does."""
    data, net = begin(target)
    model = torch.nn.parallel.DistributedDataParallel(net)
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    run_epochs(model, torch.optim.SGD(net.parameters(), 1e-3), loader, range(EPOCHS), sampler)
    if rank == 0:
        torch.save(net.state_dict(), f"{output}/python.pt")


def train_elastic(rank, size, output, path, epochs):
    """What multigpu_torchrun does: resumes from the snapshot at `path`, and leaves one of the last epoch."""
    data, net = begin()
    optimizer, first = torch.optim.SGD(net.parameters(), 1e-3, MOMENTUM), 0
    if os.path.exists(path):
        snapshot = read(path)
        net.load_state_dict(snapshot["MODEL_STATE"])
        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        first = snapshot["EPOCHS_RUN"]
    dist.barrier()  # all ranks have looked for the file
    model = torch.nn.parallel.DistributedDataParallel(net)
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    run_epochs(model, optimizer, loader, range(first, epochs), sampler)
    if rank == 0:
        torch.save({"MODEL_STATE": net.state_dict(), "OPTIMIZER_STATE": optimizer.state_dict(), "EPOCHS_RUN": epochs}, path)


def read(path):
    return torch.load(path, weights_only=True)


def tensors_of(path):
    """Parameters and momentum of a snapshot, and the epoch that it names."""
    snapshot = read(path)
    tensors = dict(snapshot["MODEL_STATE"])
    # The optimizer numbers the parameters in the model's order.
    for index, name in enumerate(list(tensors)):
        tensors[f"momentum of {name}"] = snapshot["OPTIMIZER_STATE"]["state"][index]["momentum_buffer"]
    return tensors, snapshot["EPOCHS_RUN"]


def save_tutorials_snapshot(folder):
    """What the tutorial's multigpu_torchrun.py saves after its second epoch."""
    os.mkdir(folder)
    torch.save({"MODEL_STATE": torch.nn.Linear(20, 1).state_dict(), "EPOCHS_RUN": 1}, f"{folder}/snapshot.pt")


def start(scratch, program, *words):
    subprocess.run([program, *map(str, words)], cwd=scratch, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "LOCKSTEP_DEVICE": "cpu"})


def same_bits(what, theirs, ours):
    if theirs.keys() != ours.keys():
        sys.exit(f"FAILED: {what}: the names differ: {theirs.keys() ^ ours.keys()}")
    for name, value in theirs.items():
        if not torch.equal(value, ours[name]):
            sys.exit(f"FAILED: {what}: {name} differs by {(value - ours[name]).abs().max()}")


def main():
    multigpu, single_gpu, elastic, ddp_gpus = map(os.path.realpath, sys.argv[1:5])
    print("note: ddp_toy has no row: its ranks draw their models and data without a seed, as the tutorial's do, so that no two runs of "
          "either side have equal numbers. It compares its ranks' parameters bit by bit after the step. ring_all_reduce has none either: "
          "it compares its sums with all_reduce's.")
    print("| behaviour | Python | lockstep |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        # All training comes first: a process that has computed should not fork ranks.
        run_forked(train_alone, f"{scratch}/alone.pt")
        for size in (0, 2, 3):
            os.mkdir(f"{scratch}/lockstep{size}")
            words = [EPOCHS, 1, "--batch_size", BATCH]
            start(f"{scratch}/lockstep{size}", *([multigpu, "--nproc", size] if size else [single_gpu]), *words)
            if size:
                run_python(size, train, f"{scratch}/{size}")
        start(scratch, ddp_gpus, "--max_epochs", EPOCHS, "--batch_size", BATCH, "--save", "ddp_gpus.pt", "--nproc", 2)
        run_python(2, train, f"{scratch}/ddp_gpus", torch.randn)
        words = [1, "--batch_size", BATCH, "--momentum", MOMENTUM, "--nproc", 2]
        for epochs in (2, 2 + EPOCHS):  # the second run resumes
            start(scratch, elastic, epochs, *words)
            run_python(2, train_elastic, f"{scratch}/elastic{epochs}", f"{scratch}/python.pt", epochs)
            if epochs == 2:  # each side resumes the other's snapshot as well
                os.mkdir(f"{scratch}/from_python")
                shutil.copy(f"{scratch}/python.pt", f"{scratch}/from_python/snapshot.pt")
                shutil.copy(f"{scratch}/snapshot.pt", f"{scratch}/from_lockstep.pt")
        start(f"{scratch}/from_python", elastic, 2 + EPOCHS, *words)
        run_python(2, train_elastic, f"{scratch}/elastic_crossed", f"{scratch}/from_lockstep.pt", 2 + EPOCHS)
        run_forked(save_tutorials_snapshot, f"{scratch}/tutorial")
        start(f"{scratch}/tutorial", elastic, 2, 1, "--nproc", 2)

        for size in (0, 2, 3):
            theirs = read(f"{scratch}/{size}/python.pt" if size else f"{scratch}/alone.pt")
            what = f"{size} ranks" if size else "one process without DDP"
            same_bits(what, theirs, read(f"{scratch}/lockstep{size}/checkpoint.pt"))
            print(f"| toy regression, {EPOCHS} epochs, {what} | trains | same bits |", flush=True)
        same_bits("ddp_gpus", read(f"{scratch}/ddp_gpus/python.pt"), read(f"{scratch}/ddp_gpus.pt"))
        print(f"| ddp_gpus, {EPOCHS} epochs, 2 ranks | trains | same bits |", flush=True)
        theirs, epoch = tensors_of(f"{scratch}/python.pt")
        for what, path in (("", "snapshot.pt"), (" of Python", "from_python/snapshot.pt"), (" of lockstep", "from_lockstep.pt")):
            ours, named = tensors_of(f"{scratch}/{path}")
            if named != epoch:
                sys.exit(f"FAILED: {path} names epoch {named}, Python's {epoch}")
            same_bits(f"multigpu_torchrun, snapshot{what}", theirs, ours)
            print(f"| multigpu_torchrun, momentum {MOMENTUM}, 2 ranks: 2 epochs, then {EPOCHS} from the snapshot{what} | trains | "
                  f"same bits in parameters and momentum |", flush=True)
        run = read(f"{scratch}/tutorial/snapshot.pt")["EPOCHS_RUN"]
        if run != 2:
            sys.exit(f"FAILED: the tutorial's snapshot was not resumed: epoch {run}")
        print("| multigpu_torchrun, snapshot of the tutorial, without an optimizer's state | writes | resumes |", flush=True)


if __name__ == "__main__":
    main()
