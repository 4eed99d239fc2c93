"""Compares examples/imagenet with Python: the loss of each training step, and parameters, buffers and momentum after the last one;
names and initial values, what a network computes with a state dict that C++ saved and with one that Python saved, its top-1 and
top-5 accuracy, the momentum in a checkpoint and the rate of each epoch; image files as lockstep reads and resizes them with Pillow's
and torchvision's results. The networks, and the random images of --dummy, are
torchvision's where it is installed (`pip install --no-deps torchvision pillow`), else those of the definitions below.

imagenet_parity.py IMAGENET_PROGRAM TEST_DATA_PROGRAM. Exit code 77: skipped.
"""
import functools
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib

from parity import run_python, torch

from torch import nn

program, test_data = sys.argv[1:3]
SIDE, CLASSES, SEED = 56, 7, 7  # images of 64 x 64: Resize has nothing to do, CenterCrop cuts 4 at each side
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
SHAPES = {"resnet18": (False, (2, 2, 2, 2)), "resnet50": (True, (3, 4, 6, 3))}


class Block(nn.Module):
    def __init__(self, bottleneck, into, planes, stride, downsample):
        super().__init__()
        if bottleneck:
            shapes = [(into, planes, 1, 1), (planes, planes, 3, stride), (planes, 4 * planes, 1, 1)]
        else:
            shapes = [(into, planes, 3, stride), (planes, planes, 3, 1)]
        self.count = len(shapes)
        for i, (a, b, kernel, step) in enumerate(shapes, 1):
            setattr(self, f"conv{i}", nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(b))
        self.downsample = downsample

    def forward(self, x):
        out = x
        for i in range(1, self.count + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            if i < self.count:
                out = torch.relu(out)
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, bottleneck, blocks, classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        into = 64
        for i, count in enumerate(blocks):
            planes, layer = 64 << i, []
            out = planes * (4 if bottleneck else 1)
            for block in range(count):
                stride = 2 if i and not block else 1
                downsample = None
                if stride != 1 or into != out:
                    downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
                layer.append(Block(bottleneck, into, planes, stride, downsample))
                into = out
            setattr(self, f"layer{i + 1}", nn.Sequential(*layer))
        self.fc = nn.Linear(into, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for i in range(1, 5):
            x = getattr(self, f"layer{i}")(x)
        return self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class FakeImages(torch.utils.data.Dataset):
    """torchvision's FakeData with ToTensor."""

    def __init__(self, count, side, classes, random_offset):
        self.count, self.side, self.classes, self.random_offset = count, side, classes, random_offset

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i >= self.count:
            raise IndexError
        generator = torch.Generator().manual_seed(self.random_offset + i)
        image = torch.randn(3, self.side, self.side, generator=generator).mul(255).byte()
        return image.float() / 255, int(torch.randint(0, self.classes, (), generator=generator))


@functools.cache
def torchvision():
    """The package torchvision, or None and why there is none."""
    try:
        import torchvision.transforms
    except Exception as error:  # not installed, or for another torch
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return torchvision, None


def new_model(arch, classes=CLASSES):
    package, _ = torchvision()
    return getattr(package.models, arch)(num_classes=classes) if package else ResNet(*SHAPES[arch], classes)


def dummy_images(part):
    """The images of --dummy: 640 to train on, and 64 others to validate with."""
    count, offset = {"train": (640, 0), "val": (64, 640)}[part]
    package, _ = torchvision()
    if package:
        return package.datasets.FakeData(count, (3, 32, 32), 1000, package.transforms.ToTensor(), random_offset=offset)
    return FakeImages(count, 32, 1000, offset)


def train(rank, ranks, output, batch):
    """What the program does with --dummy in an epoch of two ranks. Leaves rank 0's losses and state."""
    torch.manual_seed(SEED)
    net = new_model("resnet18", 1000)
    model, data = nn.parallel.DistributedDataParallel(net), dummy_images("train")
    sampler = torch.utils.data.distributed.DistributedSampler(data, seed=SEED)
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4), []
    for images, targets in torch.utils.data.DataLoader(data, batch // ranks, sampler=sampler):
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        torch.save((losses, net.state_dict(), optimizer.state_dict()), f"{output}/python.pt")


def check_training(scratch):
    """Loss by loss and bit by bit: ResNet-18 on the same images in the same order, 2 ranks."""
    ranks, batch = 2, 64
    run_python(ranks, train, f"{scratch}/trained", batch)
    losses, model, optimizer = torch.load(f"{scratch}/trained/python.pt", weights_only=True)
    out = imagenet(None, "-b", str(batch), "-j", "0", "--epochs", "1", "-p", "1", "--save-dir", scratch, ranks=ranks)
    ours, theirs = re.findall(r"Epoch: .*\tLoss (\S+) ", out), [f"{loss:.4e}" for loss in losses]
    if ours != theirs or len(set(theirs)) < 8:
        sys.exit(f"FAILED: resnet18, trained: losses are {ours}, Python's {theirs}")
    saved = torch.load(f"{scratch}/checkpoint.pt", weights_only=True)
    same(saved["state_dict"], model, "resnet18, trained")
    moments = [{str(i): entry["momentum_buffer"] for i, entry in state["state"].items()} for state in (saved["optimizer"], optimizer)]
    same(*moments, "resnet18's momentum, trained")
    print(f"| resnet18 trained at {ranks} ranks on --dummy's images, {len(losses)} steps of batch {batch // ranks} per rank | losses "
          f"from {theirs[0]} to {theirs[-1]} | same losses, all digits that are printed; same bits in all {len(model)} parameters "
          f"and buffers and {len(moments[1])} momentum buffers after the last step |", flush=True)


def png(pixels):
    """A PNG file of an image [3, H, W]."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape[1:]
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels.permute(1, 2, 0))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_images(folder):
    """Random images; returns those of val as batches of the program hold them, and their classes."""
    generator = torch.Generator().manual_seed(1)
    kept, targets = [], []
    for part in "train", "val":
        for target in range(CLASSES):
            os.makedirs(f"{folder}/{part}/class{target}")
            for i in range(2):
                image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=generator)
                with open(f"{folder}/{part}/class{target}/{i}.png", "wb") as file:
                    file.write(png(image))
                if part == "val":
                    kept.append((image[:, 4:60, 4:60].float() / 255 - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1))
                    targets.append(target)
    return torch.stack(kept), torch.tensor(targets)


def imagenet(folder, *flags, ranks=1):
    """What the program prints. It trains on --dummy's images where `folder` is None."""
    data = ["--image-size", str(SIDE), folder] if folder else ["--dummy"]
    command = [program, "--nproc", str(ranks), "--seed", str(SEED), *flags, *data]
    done = subprocess.run(command, env={**os.environ, "LOCKSTEP_DEVICE": "cpu"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAILED: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_evaluation(folder, arch, file, model, images, targets):
    """The program's loss of each image, to all digits that it prints, is that of the Python model."""
    out = imagenet(folder, "-a", arch, "-e", "--pretrained", file, "-b", "1", "-p", "1")
    model.eval()
    with torch.no_grad():
        outputs = [model(image.unsqueeze(0)) for image in images]
        losses = [nn.functional.cross_entropy(output, target.view(1)) for output, target in zip(outputs, targets)]
    largest = torch.cat(outputs).topk(5).indices == targets.view(-1, 1)
    accuracies = [f"{100 * largest[:, :k].sum().item() / len(targets):.3f}" for k in (1, 5)]
    wanted = [f"{loss.item():.4e}" for loss in losses] + accuracies
    found = re.findall(r"Test: .*\tLoss (\S+) ", out) + list(*re.findall(r"\*   Acc@1 (\S+) Acc@5 (\S+)", out))
    if found != wanted:
        sys.exit(f"FAILED: {arch} of {file}: losses and accuracies are {found}, Python's {wanted}")
    return (f"losses from {min(losses).item():.4e} to {max(losses).item():.4e}, Acc@1 {accuracies[0]}, Acc@5 {accuracies[1]} "
            f"of {CLASSES} classes")


def same(ours, theirs, what):
    if ours.keys() ^ theirs.keys():
        sys.exit(f"FAILED: {what}: the names differ: {sorted(ours.keys() ^ theirs.keys())}")
    for name, tensor in theirs.items():
        if not torch.equal(ours[name], tensor):
            sys.exit(f"FAILED: {what}: {name} differs")


def check_rates(folder, checkpoint):
    """The rate in the checkpoint of an epoch is that of Python's StepLR."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    schedule, rates = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1), []
    for _ in range(90):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    epochs = 29, 30, 60
    for epoch in epochs:
        imagenet(folder, "-b", "14", "--save-dir", folder, "--start-epoch", str(epoch), "--epochs", str(epoch + 1))
        rate = torch.load(checkpoint, weights_only=True)["optimizer"]["param_groups"][0]["lr"]
        if abs(rate - rates[epoch]) > 1e-15:
            sys.exit(f"FAILED: the rate of epoch {epoch} is {rate}, Python's {rates[epoch]}")
    numbers, text = ", ".join(map(str, epochs)), ", ".join(f"{rates[epoch]:g}" for epoch in epochs)
    print(f"| the rate of epochs {numbers}, by --start-epoch | StepLR(30, 0.1): {text} | same, within 1e-15 |")


def image_files(Image):
    """Images that Pillow can save, by the names of their files, each with Pillow's options. Those of "bare" lose Adobe's marker."""
    generator = torch.Generator().manual_seed(2)
    for i, (width, height) in enumerate([(97, 61), (64, 80), (33, 120), (300, 211)]):
        coarse = torch.rand(1, 3, 5, 4, generator=generator)  # smooth, with some noise
        smooth = nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0] * 220
        pixels = (smooth + 30 * torch.rand(3, height, width, generator=generator)).clamp(0, 255).byte()
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        yield f"{i}-75.jpg", image, {"quality": 75}  # 4:2:0
        yield f"{i}-95.jpg", image, {"quality": 95, "subsampling": 0, "progressive": True}
        yield f"{i}-422.jpg", image, {"quality": 85, "subsampling": 1}
        yield f"{i}-grey.jpg", image.convert("L"), {}
        yield f"{i}-cmyk.jpg", image.convert("CMYK"), {"quality": 90}
        yield f"{i}-cmyk-bare.jpg", image.convert("CMYK"), {"quality": 90}
        yield f"{i}.png", image, {}
        yield f"{i}-grey.png", image.convert("L"), {}
        yield f"{i}-grey16.png", Image.fromarray(pixels[0].numpy().astype("uint16") * 3), {}  # from 0 to 765
        yield f"{i}-palette.png", image.quantize(64), {}
        yield f"{i}-alpha.png", image.convert("RGBA"), {}


def without_adobe_marker(jpeg):
    at = jpeg.index(b"\xff\xee\x00\x0eAdobe")
    return jpeg[:at] + jpeg[at + 16:]


def check_files():
    """Image files as read_image reads them, and as Resize and CenterCrop of the evaluation leave them."""
    try:
        import numpy
        from PIL import Image
    except ImportError as error:
        print(f"SKIPPED in part: image files beside Pillow's: {error}")
        return
    package, why = torchvision()
    if package:
        transform = package.transforms.Compose([package.transforms.Resize(64), package.transforms.CenterCrop(56)])
    else:
        print(f"SKIPPED in part: resized images beside torchvision's, which cannot be imported ({why})")

    def tensor(image):
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)

    with tempfile.TemporaryDirectory() as folder:
        names = []
        for name, image, options in image_files(Image):
            path = f"{folder}/{name}"
            image.save(path, **options)
            if "bare" in name:
                with open(path, "r+b") as file:
                    bare = without_adobe_marker(file.read())
                    file.seek(0)
                    file.truncate()
                    file.write(bare)
            names.append(name)
        done = subprocess.run([test_data, "[.saved]"], env={**os.environ, "LOCKSTEP_TEST_IMAGES": folder},
                              capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"FAILED: {test_data} could not read the images:\n{done.stdout}{done.stderr}")
        ours, largest = torch.load(f"{folder}/saved.pt", weights_only=True), 0
        for name in names:
            with Image.open(f"{folder}/{name}") as file:
                image = file.convert("RGB")
            if not torch.equal(ours[name], tensor(image)):
                sys.exit(f"FAILED: {name} is not read to Pillow's bits")
            if not package:
                continue
            theirs = tensor(transform(image))
            if ours["resized " + name].shape != theirs.shape:
                sys.exit(f"FAILED: {name} is resized to {list(ours['resized ' + name].shape)}, not {list(theirs.shape)}")
            difference = (ours["resized " + name].int() - theirs.int()).abs().max().item()
            if difference > 1:
                sys.exit(f"FAILED: {name}, resized, differs from torchvision's by {difference} of 255")
            largest = max(largest, difference)
    print(f"| {len(names)} JPEG and PNG files, read | Pillow's pixels | same bits |", flush=True)
    if package:
        print(f"| the same files, after Resize and CenterCrop | torchvision's pixels | at most {largest} of 255 apart |", flush=True)


def main():
    torch.set_num_threads(1)
    package, why = torchvision()
    if package:
        print(f"note: The networks and the random images in Python are those of torchvision {package.__version__}.")
    else:
        print("note: The networks and the random images in Python are the definitions in imagenet_parity.py. "
              f"SKIPPED in part: torchvision's own, which cannot be imported ({why})")
    print("| behaviour | Python | lockstep |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        check_training(scratch)  # first: a process that has computed should not fork ranks
    check_files()
    for arch in SHAPES:
        with tempfile.TemporaryDirectory() as scratch:
            images, targets = write_images(scratch)
            flags = ["-a", arch, "-b", "8", "--save-dir", scratch]
            checkpoint = f"{scratch}/checkpoint.pt"

            # At a rate of 0 the parameters keep their initial values.
            imagenet(scratch, *flags, "--epochs", "1", "--lr", "0", ranks=2)
            torch.manual_seed(SEED)
            model = new_model(arch)
            saved = torch.load(checkpoint, weights_only=True)
            parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
            same({name: saved["state_dict"][name] for name in saved["state_dict"] if name in parameters}, parameters,
                 f"{arch}'s initial values")

            # From C++ to Python: the trained network, and the optimizer.
            imagenet(scratch, *flags, "--epochs", "1", "--lr", "0.001")
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["state_dict"])  # strict: all names and shapes
            ours = check_evaluation(scratch, arch, checkpoint, model, images, targets)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            optimizer.load_state_dict(saved["optimizer"])
            buffers = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
            if optimizer.param_groups[0]["weight_decay"] != 1e-4 or not all(buffer.abs().sum() > 0 for buffer in buffers):
                sys.exit(f"FAILED: {arch}: the checkpoint's optimizer has no momentum")

            # From Python to C++: a state dict, and a checkpoint as main.py writes it.
            torch.manual_seed(SEED + 1)
            other = new_model(arch)
            optimizer = torch.optim.SGD(other.parameters(), 0.001, momentum=0.9, weight_decay=1e-4)
            nn.functional.cross_entropy(other(images), targets).backward()
            optimizer.step()
            torch.save(other.state_dict(), f"{scratch}/python.pt")
            theirs = check_evaluation(scratch, arch, f"{scratch}/python.pt", other, images, targets)
            optimizer.param_groups[0]["initial_lr"] = 0.0  # the rate that a scheduler begins with
            torch.save({"epoch": 3, "arch": arch, "state_dict": {f"module.{k}": v for k, v in other.state_dict().items()},
                        "best_acc1": torch.tensor(50.0), "optimizer": optimizer.state_dict()}, f"{scratch}/full.pt")
            out = imagenet(scratch, *flags, "--resume", f"{scratch}/full.pt", "--epochs", "4", "--lr", "0.5")
            if "(epoch 3)" not in out:
                sys.exit(f"FAILED: {arch}: Python's checkpoint was not resumed:\n{out}")
            resumed = torch.load(checkpoint, weights_only=True)
            same({k: v for k, v in resumed["state_dict"].items() if k in parameters},
                 {k: v.detach() for k, v in other.named_parameters()}, f"{arch}'s parameters, resumed")
            if arch == "resnet18":
                check_rates(scratch, checkpoint)
            print(f"| {arch}: initial values of seed {SEED} | same | same bits in all {len(parameters)} parameters |\n"
                  f"| {arch}: saved by C++, loaded strictly by Python | {ours} | same, all digits that are printed |\n"
                  f"| {arch}: saved by Python, loaded by C++ | {theirs} | same, all digits that are printed |", flush=True)


if __name__ == "__main__":
    main()
