"""Trains the toy regression of examples/single_gpu and examples/multigpu in Python as well, from the same seed, and compares
the bits of the checkpoints.

multigpu_parity.py MULTIGPU_PROGRAM SINGLE_GPU_PROGRAM. Exit code 77: skipped.
"""
import os
import subprocess
import sys
import tempfile
import warnings

from parity import dist, torch

EPOCHS, BATCH = 3, 32


class MyTrainDataset(torch.utils.data.Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def train(rank, size, scratch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = MyTrainDataset(2048)
    net = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    model, sampler = net, None
    if size:  # 0: single_gpu, without a process group
        dist.init_process_group("gloo", init_method=f"file://{scratch}/meet", rank=rank, world_size=size)
        model = torch.nn.parallel.DistributedDataParallel(net)
        sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=not size, sampler=sampler)
    for epoch in range(EPOCHS):
        if sampler:
            sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(source), targets).backward()
            optimizer.step()
    if rank == 0:
        torch.save(net.state_dict(), f"{scratch}/python.pt")
    if size:
        dist.destroy_process_group()


def main():
    multigpu, single_gpu = map(os.path.realpath, sys.argv[1:3])
    print("| behaviour | Python | lockstep |\n|---|---|---|")
    for size in (0, 2, 3):
        with tempfile.TemporaryDirectory() as scratch:
            command = [multigpu, "--nproc", str(size)] if size else [single_gpu]
            command += [str(EPOCHS), "1", "--batch_size", str(BATCH)]
            subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
            torch.multiprocessing.spawn(train, (size, scratch), max(size, 1))
            theirs = torch.load(f"{scratch}/python.pt")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ours = dict(torch.jit.load(f"{scratch}/checkpoint.pt").named_parameters())
            if theirs.keys() != ours.keys():
                sys.exit(f"FAILED: the models differ: {theirs.keys() ^ ours.keys()}")
            for name, value in theirs.items():
                if not torch.equal(value, ours[name]):
                    sys.exit(f"FAILED: {size or 1} ranks: {name} differs by {(value - ours[name]).abs().max()}")
            what = f"{size} ranks" if size else "one process without DDP"
            print(f"| toy regression, {EPOCHS} epochs, {what} | trains | same bits |", flush=True)


if __name__ == "__main__":
    main()
