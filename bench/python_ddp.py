"""The training that is measured, in Python's DistributedDataParallel; the same as common.hpp.

torchrun ... python_ddp.py convnet|linear STEPS WARMUP, or python_ddp.py --spawn N ...; epoch FOLDER WORKERS.
`lockstep FOLDER` stands before: over the shared memory of lockstep's backend, whose extension (python_backend.cpp) lies in FOLDER.
"""
import gzip
import hashlib
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()

        def layer(inputs, outputs):
            return nn.Sequential(nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.ReLU(),
                                 nn.MaxPool2d(2))

        self.layer1, self.layer2, self.fc = layer(1, 16), layer(16, 32), nn.Linear(7 * 7 * 32, 10)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


class Digits(torch.utils.data.Dataset):
    """torchvision's MNIST with ToTensor, which makes an array of each digit and then a tensor."""

    def __init__(self, folder):
        def read(name, header):
            plain = os.path.join(folder, name)
            with open(plain, "rb") if os.path.exists(plain) else gzip.open(plain + ".gz") as file:
                return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)

        self.images = read("train-images-idx3-ubyte", 16).view(-1, 28, 28)
        self.labels = read("train-labels-idx1-ubyte", 8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        import numpy

        image = numpy.array(self.images[i].numpy(), copy=True)[:, :, None]
        image = torch.from_numpy(image.transpose((2, 0, 1))).contiguous()
        return image.to(torch.float32).div(255), int(self.labels[i])


def peak_memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def report(rank, **numbers):
    # One write, which other ranks' lines do not tear.
    os.write(1, ("BENCH " + json.dumps({"rank": rank, **numbers, "peak_kib": peak_memory()}) + "\n").encode())


def leave():
    """Ends the process of a rank at once. An interpreter that finalizes while threads of the process group still live
    aborts now and then ("terminate called without an active exception"), long after all the work was done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def make_step(what):
    torch.manual_seed(0)
    net = nn.Linear(20, 1) if what == "linear" else ConvNet()
    loss = nn.MSELoss() if what == "linear" else nn.CrossEntropyLoss()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3 if what == "linear" else 1e-2)

    def step(data, target):
        value = loss(model(data), target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return model, step


def bits(model):
    """A hash of the parameters and buffers."""
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()


def time_steps(rank, what, steps, warmup):
    model, step = make_step(what)
    torch.manual_seed(100 + rank)
    data = torch.rand(32, 20) if what == "linear" else torch.rand(32, 1, 28, 28)
    target = torch.rand(32, 1) if what == "linear" else torch.randint(10, (32,))
    times, first = [], 0
    for i in range(warmup + steps):
        begin = time.monotonic()
        step(data, target)
        end = time.monotonic()
        if i == 0:
            first = end
        if i >= warmup:
            times.append(end - begin)
    report(rank, first_step_at=first, step=statistics.median(times), bits=bits(model))


def time_epoch(rank, folder, workers):
    _, step = make_step("convnet")
    data = Digits(folder)
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    generator = torch.Generator()
    generator.manual_seed(3407 + rank)
    loader = torch.utils.data.DataLoader(data, 32, sampler=sampler, num_workers=workers, generator=generator)
    for epoch in range(2):
        begin = time.monotonic()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            step(images, labels)
    report(rank, epoch=time.monotonic() - begin)


def main(words):
    if words[0] == "lockstep":
        sys.path.insert(0, words[1])
        import bench_python_backend

        dist.Backend.register_backend("lockstep", bench_python_backend.create, devices=["cpu"])
        dist.init_process_group("lockstep")
        words = words[2:]
    else:
        dist.init_process_group("gloo")
    if words[0] == "epoch":
        time_epoch(dist.get_rank(), words[1], int(words[2]))
    else:
        time_steps(dist.get_rank(), words[0], int(words[1]), int(words[2]))
    dist.destroy_process_group()
    leave()


def spawned(rank, size, port, words):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    main(words)


if __name__ == "__main__":
    if sys.argv[1] == "--spawn":
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        size = int(sys.argv[2])
        torch.multiprocessing.spawn(spawned, (size, port, sys.argv[3:]), size)
    else:
        main(sys.argv[1:])
