"""Trains as examples/average_gradients does, in Python, from the same seeds on real digits, and compares rank 0's loss and
accuracy of each step bit by bit. Nothing is copied from one side to the other.

average_gradients_parity.py PROGRAM SHARED_FOLDER; the folder holds data/mnist. Exit code 77: skipped.
"""
import csv
import os
import subprocess
import sys
import tempfile

from parity import dist, skip, torch

program, shared = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
folder = os.path.join(shared, "data", "mnist")
if __name__ == "__main__" and not (shared and os.path.isdir(folder)):
    skip("no real digits (set LOCKSTEP_SHARED to a folder with data/mnist)")

from mnist_parity import ConvNet, Digits, leave
from torch import nn


def average_gradients(model, size):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
        parameter.grad.data /= float(size)


def train(rank, size, scratch):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/meet", rank=rank, world_size=size)
    loader = torch.utils.data.DataLoader(Digits("train"), batch_size=100, shuffle=True)
    torch.manual_seed(0)
    model = ConvNet()
    torch.manual_seed(rank)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    curve = []
    for images, labels in loader:
        outputs = model(images)
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        curve.append((loss.item(), (outputs.argmax(1) == labels).sum().item() / len(labels)))
        average_gradients(model, size)
        optimizer.step()
    if rank == 0:
        torch.save(curve, f"{scratch}/python.pt")
    dist.destroy_process_group()
    leave()


def lockstep(ranks, path):
    command = [program, "--nproc", str(ranks), "--epochs", "1", "--data-dir", folder, "--plot", path]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"FAILED: {' '.join(command)} ended with {done.returncode}")
    with open(path) as file:
        return [(float(row["loss"]), float(row["accuracy"])) for row in csv.DictReader(file)]


def main():
    print("| behaviour | Python | lockstep |\n|---|---|---|")
    for ranks in (2, 3):
        with tempfile.TemporaryDirectory() as scratch:
            ours = lockstep(ranks, f"{scratch}/curve.csv")
            torch.multiprocessing.spawn(train, (ranks, scratch), ranks)
            theirs = torch.load(f"{scratch}/python.pt")
        if len(ours) != len(theirs) or len(ours) < 50:
            sys.exit(f"FAILED: {len(ours)} steps, Python made {len(theirs)}")
        for step, (mine, other) in enumerate(zip(ours, theirs), 1):
            # Nine digits in the file stand for one float32.
            if torch.tensor(mine[0], dtype=torch.float32).item() != other[0] or mine[1] != other[1]:
                sys.exit(f"FAILED: {ranks} ranks: step {step}: loss and accuracy {mine}, Python's {other}")
        if not ours[-1][0] < ours[0][0] / 2:
            sys.exit(f"FAILED: {ranks} ranks: nothing was learned: loss {ours[0][0]}, then {ours[-1][0]}")
        print(f"| gradients averaged by hand, {ranks} ranks | loss {theirs[49][0]:.9g} at step 50 | loss {ours[49][0]:.9g} "
              f"at step 50, same bits in all {len(ours)} steps |", flush=True)


if __name__ == "__main__":
    main()
