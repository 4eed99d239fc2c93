"""CPU time of the example programs and of their Python originals: the same data, seed, ranks and steps.

examples.py FOLDER_OF_PROGRAMS SHARED_FOLDER [--rounds 3] [--only NAME ...]
To be run by the Python that has the torch package of the programs. The shared folder holds data/mnist and data/tinyshakespeare.txt.
Both sides run in turn, 2 Gloo ranks of one thread (origin_main: one process). Python refuses SyncBatchNorm on CPUs; ddp_main's
counterpart has a layer written in Python (tests/examples/mnist_parity.py). A figure is the user CPU time of all processes of a
run, which tells more than wall time on a busy machine. "run" is the time of the long run, starting included; "training" is that
time without the time of the short run, which leaves the steps between. The ratio is lockstep's time over Python's, the median
over the rounds.
"""
import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

RANKS = 2
HERE = os.path.dirname(os.path.abspath(__file__))
for part in ("../tests/support", "../tests/examples"):
    sys.path.insert(0, os.path.join(HERE, part))

# Each example: the units (epochs, or steps) of the short and of the long run, and what a unit is.
EXAMPLES = {
    "multigpu": (10, 110, "an epoch of 32 steps, batch 32"),
    "multigpu_torchrun": (10, 110, "an epoch of 32 steps, batch 32, with momentum"),
    "average_gradients": (1, 2, "an epoch of 80 steps, batch 100"),
    "mnist": (1, 2, "an epoch of 125 steps, batch 32"),
    "origin_main": (1, 2, "an epoch of 250 steps, batch 32, one process"),
    "ddp_main": (1, 2, "an epoch of 125 steps, batch 32, SyncBatchNorm"),
    "imagenet": (1, 3, "an epoch of 20 steps, batch 16, and a validation"),
    "mingpt": (20, 60, "a step, batch 16, block 64"),
}


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
        "multigpu": lambda: [str(units), str(units)],
        "multigpu_torchrun": lambda: [str(units), str(units), "--momentum", "0.9"],
        "average_gradients": lambda: ["--epochs", str(units), *digits],
        "mnist": lambda: ["--epochs", str(units), "--lr", "0.02", "--sync-batchnorm", "off", *digits],
        "origin_main": lambda: ["--epochs", str(units), *digits],
        "ddp_main": lambda: ["--epochs", str(units), *digits],
        "imagenet": lambda: ["--epochs", str(units), "--seed", "7", "--workers", "0", "--save-dir", scratch],
        "mingpt": lambda: ["--data-path", text_for(scratch, shared, units), *(f"{key}={value}" for key, value in gpt.items())],
    }
    ranks = [] if name == "origin_main" else ["--nproc", str(RANKS)]
    return [os.path.join(folder, name), *ranks, *arguments[name]()]


def python_rank(rank, name, units, scratch, shared):
    """A rank of the Python original. Models and data are those of the comparisons in tests/examples."""
    sys.argv = [name, name, shared]  # what those scripts read when they are imported
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy, mse_loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    torch.set_num_threads(1)
    ranks = 1 if name == "origin_main" else RANKS
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/meet", rank=rank, world_size=ranks)
    if name in ("multigpu", "multigpu_torchrun"):
        from multigpu_parity import MyTrainDataset
        torch.manual_seed(0)
        data, model = MyTrainDataset(2048), torch.nn.Linear(20, 1)
        momentum = 0.9 if name == "multigpu_torchrun" else 0
        loss_of, optimizer, batch, seed = mse_loss, torch.optim.SGD(model.parameters(), 1e-3, momentum), 32, 0
    elif name in ("origin_main", "ddp_main"):
        from mnist_parity import Digits, template_net
        data, model, loss_of, batch, seed = Digits("train"), template_net(ranks > 1), cross_entropy, 32, 0
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    elif name in ("mnist", "average_gradients"):
        from average_gradients_parity import average_gradients
        from mnist_parity import ConvNet, Digits
        torch.manual_seed(3407 if name == "mnist" else 0)
        data, model, loss_of = Digits("train"), ConvNet(), cross_entropy
        batch, seed = (32, 3407) if name == "mnist" else (100, 0)
        rate = dict(lr=0.02) if name == "mnist" else dict(lr=0.001, momentum=0.9)
        optimizer = torch.optim.SGD(model.parameters(), **rate)
    elif name == "imagenet":
        sys.argv = [name, name]
        import imagenet_parity
        imagenet_parity.CLASSES = 1000

        class RandomImages(torch.utils.data.Dataset):  # as torchvision's FakeData with ToTensor
            def __init__(self, count, seed):
                self.count, self.seed = count, seed

            def __len__(self):
                return self.count

            def __getitem__(self, i):
                if i >= self.count:
                    raise IndexError
                generator = torch.Generator().manual_seed(self.seed + i)
                image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=generator)
                return image.float() / 255, int(torch.randint(0, 1000, (), generator=generator))

        torch.manual_seed(7)
        data, validation = RandomImages(640, 1), RandomImages(64, 2)
        model, loss_of, batch, seed = imagenet_parity.new_model("resnet18"), cross_entropy, 16, 7
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    else:
        from mingpt_parity import Characters, Gpt, decay_groups
        data = Characters(text_for(scratch, shared, units), 64)
        torch.manual_seed(3407)
        model = Gpt(data.characters, 64, 4, 4, 128, 0.0)
        optimizer, batch, seed = torch.optim.AdamW(decay_groups(model), lr=3e-4, betas=(0.9, 0.95)), 16, 3407
        loss_of = lambda outputs, targets: cross_entropy(outputs.flatten(0, 1), targets.flatten())

    if name in ("average_gradients", "origin_main"):  # without DistributedDataParallel: every rank sees all samples
        forward, sampler = model, None
        loader = DataLoader(data, batch, shuffle=True)
    else:
        forward, sampler = DistributedDataParallel(model), DistributedSampler(data, seed=seed)
        loader = DataLoader(data, batch, sampler=sampler)
    for epoch in range(2 if name == "mingpt" else units):
        if sampler:
            sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(forward(inputs), targets)
            loss.backward()
            if name == "average_gradients":
                average_gradients(model, ranks)
            if name == "mingpt":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if name == "imagenet":
            model.eval()
            with torch.no_grad():
                for inputs, targets in DataLoader(validation, batch, sampler=range(rank, 64, RANKS)):
                    forward(inputs)
    if name in ("mnist", "origin_main", "ddp_main"):
        model.eval()
        test = Digits("t10k")
        with torch.no_grad():
            for inputs, targets in DataLoader(test, batch, sampler=range(rank, len(test), ranks)):
                model(inputs)
    if rank == 0 and name == "multigpu_torchrun":
        snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": units}
        torch.save(snapshot, f"{scratch}/snapshot.pt")
    if ranks > 1:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # an interpreter that finalizes beside threads of a process group aborts now and then


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
            with tempfile.TemporaryDirectory() as scratch:
                command = lockstep_command(name, folder, shared, units, scratch)
                if side == "Python":
                    command = [sys.executable, os.path.abspath(__file__), folder, shared, "--python", name, str(units), scratch]
                sides[side].append(user_seconds(command, scratch))
    return sides


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("shared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--python", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.python:
        import torch
        name, units, scratch = arguments.python
        ranks = 1 if name == "origin_main" else RANKS
        torch.multiprocessing.spawn(python_rank, (name, int(units), scratch, arguments.shared), ranks)
        return
    folder, shared = os.path.abspath(arguments.folder), os.path.abspath(arguments.shared)
    print("| example | training | lockstep | Python | ratio | run, with the start | lockstep | Python | ratio |\n"
          "|---|---|---|---|---|---|---|---|---|")
    for name in arguments.only:
        short, long, unit = EXAMPLES[name]
        rounds = [measure(name, folder, shared) for _ in range(arguments.rounds)]
        cells = []
        for what, seconds in ((f"{long - short} x {unit}", lambda times: times[1] - times[0]), (f"{long} x", lambda times: times[1])):
            ours, theirs = ([seconds(each[side]) for each in rounds] for side in ("lockstep", "Python"))
            ratios = sorted(a / b for a, b in zip(ours, theirs))
            cells += [what, f"{statistics.median(ours):.2f} s", f"{statistics.median(theirs):.2f} s",
                      f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
