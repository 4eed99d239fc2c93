"""Trains examples/mnist's network on real digits in Python DDP as well, from the same initial values, and compares.
Python's SyncBatchNorm is for GPUs only, so that bits are compared without it, and with it the accuracy.

mnist_parity.py MNIST_PROGRAM SHARED_FOLDER; the folder holds data/mnist. Exit code 77: skipped.
"""
import gzip
import os
import re
import subprocess
import sys
import tempfile
import warnings

from parity import dist, skip, torch

program, shared = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
folder = os.path.join(shared, "data", "mnist")
if __name__ == "__main__" and not (shared and os.path.isdir(folder)):
    skip("no real digits (set LOCKSTEP_SHARED to a folder with data/mnist)")

from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench"))
from python_ddp import ConvNet, leave  # the same network

EPOCHS, BATCH, RATE, SEED = 2, 32, 0.02, 3407


class Digits(torch.utils.data.Dataset):
    def __init__(self, part):
        with gzip.open(f"{folder}/{part}-images-idx3-ubyte.gz") as file:
            self.images = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)
        with gzip.open(f"{folder}/{part}-labels-idx1-ubyte.gz") as file:
            self.labels = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i].to(torch.float32).div(255), self.labels[i]


def train(rank, size, scratch):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/meet", rank=rank, world_size=size)
    net = ConvNet()
    net.load_state_dict(state_of(f"{scratch}/initial.pt"))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    data = Digits("train")
    sampler = torch.utils.data.distributed.DistributedSampler(data, seed=SEED)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        net.eval()
        test = Digits("t10k")
        with torch.no_grad():
            right = (net(test.images.float().div(255)).argmax(1) == test.labels).sum().item()
        torch.save({"state": net.state_dict(), "accuracy": 100 * right / len(test)}, f"{scratch}/python.pt")
    dist.destroy_process_group()
    leave()


def state_of(path):
    """The tensors of a model that C++ saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.load(path)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def lockstep(ranks, epochs, save, sync="off"):
    command = [program, "--nproc", str(ranks), "--epochs", str(epochs), "--batch-size", str(BATCH), "--lr", str(RATE),
               "--seed", str(SEED), "--sync-batchnorm", sync, "--data-dir", folder, "--save", save]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"FAILED: {' '.join(command)} ended with {done.returncode}")
    return float(re.search(r"Accuracy is ([\d.]+)%", done.stdout).group(1))


def main():
    print("| behaviour | Python | lockstep |\n|---|---|---|")
    for ranks in (2, 3):
        with tempfile.TemporaryDirectory() as scratch:
            lockstep(ranks, 0, f"{scratch}/initial.pt")
            ours = lockstep(ranks, EPOCHS, f"{scratch}/lockstep.pt")
            torch.multiprocessing.spawn(train, (ranks, scratch), ranks)
            theirs = torch.load(f"{scratch}/python.pt")
            state, moved = state_of(f"{scratch}/lockstep.pt"), 0
            initial = state_of(f"{scratch}/initial.pt")
            if state.keys() != theirs["state"].keys():
                sys.exit(f"FAILED: the models differ: {state.keys() ^ theirs['state'].keys()}")
            for name, value in theirs["state"].items():
                if not torch.equal(value, state[name]):
                    sys.exit(f"FAILED: {ranks} ranks: {name} differs by {(value - state[name]).abs().max()}")
                moved += not torch.equal(value, initial[name])
            if moved != len(state):
                sys.exit(f"FAILED: only {moved} of {len(state)} tensors were trained at all")
            # Bits are one thing; the accuracy that the program prints is summed over its ranks.
            if abs(ours - theirs["accuracy"]) > 0.5:
                sys.exit(f"FAILED: accuracy {ours} %, Python DDP's {theirs['accuracy']} %")
            joined = lockstep(ranks, EPOCHS, f"{scratch}/joined.pt", "on")
            if abs(joined - ours) > 0.5:
                sys.exit(f"FAILED: {ranks} ranks: accuracy {joined} % with SyncBatchNorm, {ours} % without")
            if torch.equal(state_of(f"{scratch}/joined.pt")["fc.weight"], state["fc.weight"]):
                sys.exit(f"FAILED: {ranks} ranks: the same bits with and without SyncBatchNorm")
            print(f"| {EPOCHS} epochs at {ranks} ranks, batch norm of each rank | accuracy {theirs['accuracy']:.1f} % | "
                  f"accuracy {ours} %, same bits in all {len(state)} tensors |\n| the same with SyncBatchNorm | - | "
                  f"accuracy {joined} % |", flush=True)


if __name__ == "__main__":
    main()
