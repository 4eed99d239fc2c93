"""Trains the network of examples/mnist, examples/ddp_main and examples/origin_main on real digits in Python as well, and
compares parameters, running statistics and accuracy.

mnist and Python's DDP start from the same values. ddp_main and origin_main exchange nothing with Python: initial values and the
order of the digits follow from the same seeds. Python's SyncBatchNorm is for GPUs only. So mnist's bits are compared without it,
and ddp_main's with a layer that computes as lockstep's does, from the same kernels of LibTorch; one process that trains torch's
own BatchNorm2d on the joined batches is the independent comparison.

mnist_parity.py MNIST_PROGRAM SHARED_FOLDER DDP_MAIN_PROGRAM ORIGIN_MAIN_PROGRAM; the folder holds data/mnist. Exit code 77:
skipped.
"""
import gzip
import os
import re
import struct
import subprocess
import sys
import tempfile
import warnings

from parity import dist, run_forked, run_python, skip, torch

program, shared = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
folder = os.path.join(shared, "data", "mnist")
if __name__ == "__main__" and not (shared and os.path.isdir(folder)):
    skip("no real digits (set LOCKSTEP_SHARED to a folder with data/mnist)")

from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench"))
from python_ddp import ConvNet, leave  # the same network

EPOCHS, BATCH, RATE, SEED = 2, 32, 0.02, 3407
TRAIN_DIGITS, TEST_DIGITS, TEMPLATE_RATE = 960, 300, 0.01  # of ddp_main and origin_main: tens of steps


class Digits(torch.utils.data.Dataset):
    def __init__(self, part, source=folder):
        with gzip.open(f"{source}/{part}-images-idx3-ubyte.gz") as file:
            self.images = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)
        with gzip.open(f"{source}/{part}-labels-idx1-ubyte.gz") as file:
            self.labels = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i].to(torch.float32).div(255), self.labels[i]


def write_first_digits(target):
    """A folder like `folder` with its first digits only."""
    os.makedirs(target)
    for part, count in ("train", TRAIN_DIGITS), ("t10k", TEST_DIGITS):
        for name, head, size in ("images-idx3", ">4i", 28 * 28), ("labels-idx1", ">2i", 1):
            with gzip.open(f"{folder}/{part}-{name}-ubyte.gz") as file:
                numbers = list(struct.unpack(head, file.read(struct.calcsize(head))))
                numbers[1] = count
                digits = file.read(count * size)
            with gzip.open(f"{target}/{part}-{name}-ubyte.gz", "wb", compresslevel=1) as file:
                file.write(struct.pack(head, *numbers) + digits)


def run_epochs(forward, parameters, loader, rate, sampler=None):
    optimizer = torch.optim.SGD(parameters, rate)
    for epoch in range(EPOCHS):
        if sampler:
            sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(forward(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def save_result(net, path, source=folder):
    """The trained tensors, and the percentage of the test digits that the network knows."""
    net.eval()
    test = Digits("t10k", source)
    with torch.no_grad():
        right = (net(test.images.float().div(255)).argmax(1) == test.labels).sum().item()
    torch.save({"state": net.state_dict(), "accuracy": 100 * right / len(test)}, path)


def train(rank, size, output, initial):
    net = ConvNet()
    net.load_state_dict(state_of(initial))
    model = nn.parallel.DistributedDataParallel(net)
    data = Digits("train")
    sampler = torch.utils.data.distributed.DistributedSampler(data, seed=SEED)
    run_epochs(model, model.parameters(), torch.utils.data.DataLoader(data, BATCH, sampler=sampler), RATE, sampler)
    if rank == 0:
        save_result(net, f"{output}/python.pt")


class JoinedStatistics(torch.autograd.Function):
    """Batch norm over the batches of all ranks, on LibTorch's kernels for CPUs. Ranks exchange their mean, their sum of squared
    deviations and their count; what is done for each channel is done in float64."""

    @staticmethod
    def affine(inputs, scale, shift, mean):
        return torch.native_batch_norm(inputs, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]

    @staticmethod
    def forward(context, inputs, weight, bias, running, momentum, eps, group):
        channels, count = inputs.size(1), inputs.numel() // inputs.size(1)
        mean, variance = torch.batch_norm_update_stats(inputs, None, None, 0.0)
        own = torch.cat([mean.double(), variance.double() * count, torch.tensor([count], dtype=torch.float64)])
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, own, group)
        mean, squares, total = torch.zeros(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64), 0.0
        for row in rows:
            more, distance = row[-1].item(), row[:channels] - mean
            mean = mean + distance * (more / (total + more))
            squares = squares + (row[channels:-1] + distance * distance * (total * more / (total + more)))
            total += more
        for statistic, batch in zip(running, (mean, squares / (total - 1))):
            statistic.copy_(statistic.double().mul_(1 - momentum).add_(batch, alpha=momentum))
        mean, deviation = mean.float(), (squares / total).add_(eps).rsqrt_().float()
        context.save_for_backward(inputs, weight, mean, deviation)
        context.total, context.group = total, group
        return JoinedStatistics.affine(inputs, deviation * weight, bias, mean)

    @staticmethod
    def backward(context, gradient):
        inputs, weight, mean, deviation = context.saved_tensors
        channels = inputs.size(1)
        _, products, plain = torch.ops.aten.native_batch_norm_backward(
            gradient, inputs, None, mean, torch.ones_like(mean), None, None, False, 0.0, [False, True, True])
        sums = torch.cat([plain.double(), products.double()])
        of_weight, of_bias = (sums[channels:] * deviation).float(), sums[:channels].float()
        dist.all_reduce(sums, group=context.group)
        means, deviation = sums / context.total, deviation.double()
        scale = deviation * weight.double()
        slope, shift = -(means[channels:] * deviation * deviation * scale), -(means[:channels] * scale)
        of_inputs = JoinedStatistics.affine(inputs, slope.float(), shift.float(), mean)
        of_inputs.addcmul_(gradient, scale.float().view(1, -1, 1, 1))
        return of_inputs, of_weight, of_bias, None, None, None, None


class JoinedBatchNorm(nn.BatchNorm2d):
    group = None

    def forward(self, inputs):
        if not self.training:
            return super().forward(inputs)
        self.num_batches_tracked += 1
        running = self.running_mean, self.running_var
        return JoinedStatistics.apply(inputs, self.weight, self.bias, running, self.momentum, self.eps, self.group)


def template_net(joined):
    """The network of ddp_main and origin_main; `joined`: its batch norm is over the batches of all ranks."""
    torch.manual_seed(SEED)
    net = ConvNet()
    if joined:
        group = dist.new_group()  # batch norm's own, so that its collectives cannot mix with those of the buckets
        for layer in net.layer1, net.layer2:
            layer[1].__class__, layer[1].group = JoinedBatchNorm, group
    return net


def train_template(rank, size, output, source):
    """What ddp_main does."""
    net = template_net(joined=True)
    model = nn.parallel.DistributedDataParallel(net)
    data = Digits("train", source)
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    run_epochs(model, model.parameters(), loader, TEMPLATE_RATE, sampler)
    if rank == 0:
        save_result(net, f"{output}/python.pt", source)


class JoinedSampler:
    """The indices of all ranks, a batch of each in turn."""

    def __init__(self, data, ranks):
        self.samplers = [torch.utils.data.distributed.DistributedSampler(data, ranks, rank) for rank in range(ranks)]

    def set_epoch(self, epoch):
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self):
        orders = [list(sampler) for sampler in self.samplers]
        for begin in range(0, len(orders[0]), BATCH):
            yield [index for order in orders for index in order[begin : begin + BATCH]]


def train_alone(ranks, output, source):
    """What origin_main does; with ranks, what so many of ddp_main compute, but in one process with torch's own BatchNorm2d."""
    torch.set_num_threads(1)
    net, data = template_net(joined=False), Digits("train", source)
    if ranks:
        sampler = JoinedSampler(data, ranks)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    else:
        sampler, loader = None, torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    run_epochs(net, net.parameters(), loader, TEMPLATE_RATE, sampler)
    save_result(net, output, source)


def state_of(path):
    """The tensors of a model that Trainer.save wrote."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.load(path)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def accuracy_of(command):
    """Runs a program and returns the accuracy that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_DEVICE": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"FAILED: {' '.join(command)} ended with {done.returncode}")
    return float(re.search(r"Accuracy is ([\d.]+)%", done.stdout).group(1))


def lockstep(ranks, epochs, save, sync="off"):
    return accuracy_of([program, "--nproc", str(ranks), "--epochs", str(epochs), "--batch-size", str(BATCH), "--lr", str(RATE),
                        "--seed", str(SEED), "--sync-batchnorm", sync, "--data-dir", folder, "--save", save])


def template(command, save, source):
    return accuracy_of([*command, "-e", str(EPOCHS), "-b", str(BATCH), "--lr", str(TEMPLATE_RATE), "--data-dir", source,
                        "--save", save])


def same_bits(what, theirs, ours):
    """Ends the test unless all tensors are equal, and all were trained."""
    if ours.keys() != theirs.keys():
        sys.exit(f"FAILED: {what}: the models differ: {theirs.keys() ^ ours.keys()}")
    for name, value in theirs.items():
        if not torch.equal(value, ours[name]):
            sys.exit(f"FAILED: {what}: {name} differs by {(value - ours[name]).abs().max()}")


def compare_mnist(ranks, scratch, ours, joined):
    theirs = torch.load(f"{scratch}/{ranks}/python.pt")
    state, initial = state_of(f"{scratch}/lockstep{ranks}.pt"), state_of(f"{scratch}/initial.pt")
    same_bits(f"{ranks} ranks", theirs["state"], state)
    moved = sum(not torch.equal(value, initial[name]) for name, value in state.items())
    if moved != len(state):
        sys.exit(f"FAILED: only {moved} of {len(state)} tensors were trained at all")
    # Bits are one thing; the accuracy that the program prints is summed over its ranks.
    if abs(ours - theirs["accuracy"]) > 0.5:
        sys.exit(f"FAILED: accuracy {ours} %, Python DDP's {theirs['accuracy']} %")
    if abs(joined - ours) > 0.5:
        sys.exit(f"FAILED: {ranks} ranks: accuracy {joined} % with SyncBatchNorm, {ours} % without")
    if torch.equal(state_of(f"{scratch}/joined{ranks}.pt")["fc.weight"], state["fc.weight"]):
        sys.exit(f"FAILED: {ranks} ranks: the same bits with and without SyncBatchNorm")
    print(f"| mnist, {EPOCHS} epochs at {ranks} ranks, batch norm of each rank | accuracy {theirs['accuracy']:.1f} % | "
          f"accuracy {ours} %, same bits in all {len(state)} tensors |\n| the same with SyncBatchNorm | - | "
          f"accuracy {joined} % |", flush=True)


def compare_template(what, steps, theirs, state, ours):
    same_bits(what, theirs["state"], state)
    if not 50 < ours < 100 or abs(ours - theirs["accuracy"]) > 0.005:
        sys.exit(f"FAILED: {what}: accuracy {ours} %, Python's {theirs['accuracy']} %")
    print(f"| {what}, {steps} steps | accuracy {theirs['accuracy']:.2f} % | accuracy {ours:.2f} %, same bits in all "
          f"{len(state)} tensors |", flush=True)


def main():
    ddp_main, origin_main = sys.argv[3:5]
    print("| behaviour | Python | lockstep |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        # All training comes first: a process that has computed should not fork ranks.
        lockstep(2, 0, f"{scratch}/initial.pt")
        accuracies, digits = {}, f"{scratch}/digits"
        for ranks in (2, 3):
            accuracies[ranks] = (lockstep(ranks, EPOCHS, f"{scratch}/lockstep{ranks}.pt"),
                                 lockstep(ranks, EPOCHS, f"{scratch}/joined{ranks}.pt", "on"))
            run_python(ranks, train, f"{scratch}/{ranks}", f"{scratch}/initial.pt")
        write_first_digits(digits)
        alone = template([origin_main], f"{scratch}/origin.pt", digits)
        run_forked(train_alone, 0, f"{scratch}/alone.pt", digits)
        templates = {}
        for ranks in (2, 3):
            templates[ranks] = template([ddp_main, "--nproc", str(ranks)], f"{scratch}/ddp{ranks}.pt", digits)
            run_python(ranks, train_template, f"{scratch}/template{ranks}", digits)
            run_forked(train_alone, ranks, f"{scratch}/alone{ranks}.pt", digits)

        for ranks, (ours, joined) in accuracies.items():
            compare_mnist(ranks, scratch, ours, joined)
        steps = EPOCHS * TRAIN_DIGITS // BATCH
        compare_template("origin_main", steps, torch.load(f"{scratch}/alone.pt"),
                         torch.load(f"{scratch}/origin.pt", weights_only=True), alone)
        for ranks, ours in templates.items():
            state = torch.load(f"{scratch}/ddp{ranks}.pt", weights_only=True)["model"]
            compare_template(f"ddp_main at {ranks} ranks, with SyncBatchNorm", steps // ranks,
                             torch.load(f"{scratch}/template{ranks}/python.pt"), state, ours)
            whole = torch.load(f"{scratch}/alone{ranks}.pt")
            far = max((state[name] - value).abs().max().item() for name, value in whole["state"].items())
            if not far < 1e-3:
                sys.exit(f"FAILED: ddp_main at {ranks} ranks: a tensor differs by {far:.1e} from that of one process")
            print(f"| the same, beside one process with BatchNorm2d on the joined batches | accuracy {whole['accuracy']:.2f} % | "
                  f"accuracy {ours:.2f} %, largest difference {far:.0e} |", flush=True)


if __name__ == "__main__":
    main()
