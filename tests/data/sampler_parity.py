"""Compares lockstep's samplers and loader with those of the real Python package, index by index.

usage: sampler_parity.py PROGRAM [number of random configurations]

All configurations go to one run of the C++ program. The first that differs is printed, with exit code 1.
"""

import math
import random
import subprocess
import sys

from parity import torch
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler


def sampler_lines(draw, count):
    """Configurations of DistributedSampler: the corners by hand, the rest at random."""
    corners = [
        (length, world, 0, 0, shuffle, drop_last)
        for length in (0, 1, 2, 3, 7, 8, 9)
        for world in (1, 2, 3, 8, 16)
        for shuffle in (0, 1)
        for drop_last in (0, 1)
    ]
    big = (1 << 31) + 5, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 200
    for _ in range(count):
        length = draw.randint(0, 40) if draw.random() < 0.3 else int(math.exp(draw.uniform(0, math.log(1e5))))
        world = draw.randint(1, 16)
        seed = draw.choice((0, 42, 3407, draw.randrange(1 << 20), draw.randrange(1 << 63), draw.choice(big)))
        epoch = draw.choice((0, 1, 2, draw.randint(0, 100)))
        corners.append((length, world, seed, epoch, int(draw.random() < 0.8), int(draw.random() < 0.5)))
    return [("sampler", *corner, draw.choice((1, 7, 32, 100000))) for corner in corners]


def expected_sampler(length, world, seed, epoch, shuffle, drop_last, _batch):
    for rank in range(world):
        sampler = DistributedSampler(range(length), world, rank, bool(shuffle), seed, bool(drop_last))
        sampler.set_epoch(epoch)
        yield [len(sampler), *sampler]


def expected_weighted(weights, samples, world, seed, epoch, replacement):
    generator = torch.Generator().manual_seed(seed + epoch)
    values = [(i * 7 % 11 + 1) / 8 for i in range(weights)]
    order = list(WeightedRandomSampler(values, samples, bool(replacement), generator))
    for rank in range(world):
        yield [order[i] for i in DistributedSampler(order, world, rank, shuffle=False)]


def passes(loader, epochs, sampler=None):
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        numbers = [len(loader)]
        for batch in loader:
            numbers += [len(batch), *batch.tolist()]
        yield [*numbers, torch.randint(1 << 30, (1,)).item()]


def expected_random(length, seed, epochs, batch, drop_last, workers, own_generator):
    torch.manual_seed(seed)
    generator = torch.Generator() if own_generator else None
    if own_generator:
        generator.manual_seed(seed + 1)
    return passes(
        DataLoader(
            range(length),
            batch,
            shuffle=True,
            drop_last=bool(drop_last),
            num_workers=workers,
            generator=generator,
        ),
        epochs,
    )


def expected_loader(length, world, rank, seed, epochs, batch, drop_last, workers):
    torch.manual_seed(seed)
    sampler = DistributedSampler(range(length), world, rank, seed=seed)
    loader = DataLoader(range(length), batch, sampler=sampler, drop_last=bool(drop_last), num_workers=workers)
    return passes(loader, epochs, sampler)


def main():
    program = sys.argv[1]
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 600
    draw = random.Random(20240229)
    lines = sampler_lines(draw, count)
    for number in range(60):
        workers = 2 if number % 20 == 0 else 0  # Python's workers are processes: slow to start
        length, batch = draw.randint(1, 300), draw.randint(1, 40)
        seed, epochs, drop_last = draw.randrange(1 << 40), draw.randint(1, 4), draw.randint(0, 1)
        lines.append(("random", length, seed, epochs, batch, drop_last, workers, draw.randint(0, 1)))
        world = draw.randint(1, 8)
        lines.append(("loader", length, world, draw.randrange(world), seed, epochs, batch, drop_last, workers))
        weights, replacement = draw.randint(1, 300), draw.randint(0, 1)
        samples = draw.randint(1, 400 if replacement else weights)
        lines.append(("weighted", weights, samples, world, seed, draw.randint(0, 9), replacement))
    for seed in (0, 3407):  # whole multiples: the pass ends without a batch that is not full
        lines += [("random", 64, seed, 3, 16, drop_last, 0, own) for drop_last in (0, 1) for own in (0, 1)]

    text = "".join(" ".join(map(str, line)) + "\n" for line in lines)
    run = subprocess.run([program], input=text.encode(), stdout=subprocess.PIPE)
    if run.returncode != 0:
        print(f"{program} ended with {run.returncode}")
        return 1
    numbers = torch.frombuffer(bytearray(run.stdout), dtype=torch.int64)

    at, lists = 0, 0
    makers = {
        "sampler": expected_sampler,
        "random": expected_random,
        "loader": expected_loader,
        "weighted": expected_weighted,
    }
    for kind, *values in lines:
        for part, expected in enumerate(makers[kind](*values)):
            length = numbers[at].item() if at < len(numbers) else -1
            got = numbers[at + 1 : at + 1 + length].tolist()
            if got != expected:
                first = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), "the end")
                print(f"DIFFERENT: {kind} {values}, list {part} (a rank or an epoch), at {first}")
                print(f"  lockstep {got[:20]} ({len(got)} numbers)")
                print(f"  Python   {expected[:20]} ({len(expected)} numbers)")
                return 1
            at += 1 + length
            lists += 1
    if at != len(numbers):
        print(f"{program} printed {len(numbers) - at} numbers too many")
        return 1
    print("| behaviour | Python | lockstep |\n|---|---|---|")
    for kind, words in {
        "sampler": "indices of each rank | `DistributedSampler`",
        "random": "batches of one process | `DataLoader(shuffle=True)`, several epochs",
        "loader": "batches of a rank | `DataLoader` over a `DistributedSampler`, several epochs",
        "weighted": "indices of each rank | `WeightedRandomSampler`, partitioned by `DistributedSampler`",
    }.items():
        print(f"| {words}, {sum(line[0] == kind for line in lines)} configurations | the same |")
    print(f"{len(lines)} configurations ({lists} lists, {at - lists} numbers) equal to torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
