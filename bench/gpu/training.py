"""What run.py measures of Python; the same as training.cpp.

torchrun ... training.py SYSTEM MODEL PRECISION SIZE STEPS WARMUP [TRACE], or collectives SMALLEST LARGEST.
SYSTEM: bare (no wrapper, one process), ddp, captured (a CUDA graph of the whole step).
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from python_ddp import ConvNet, leave, peak_memory, report  # noqa: E402


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()

        def convolution(into, out, kernel, step):
            return nn.Conv2d(into, out, kernel, stride=step, padding=kernel // 2, bias=False)

        self.conv1, self.bn1 = convolution(inputs, width, 1, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1, 1), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(convolution(inputs, 4 * width, 1, stride), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs, layers = width, []
        for layer, count in enumerate([3, 4, 6, 3]):
            for block in range(count):
                layers.append(Bottleneck(inputs, width << layer, 2 if layer > 0 and block == 0 else 1))
                inputs = 4 * (width << layer)
        self.layers, self.fc = nn.Sequential(*layers), nn.Linear(inputs, classes)

    def forward(self, data):
        x = F.max_pool2d(torch.relu(self.bn1(self.conv1(data))), 3, 2, 1)
        return self.fc(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.attn, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln2, self.fc, self.out = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.attn(self.ln1(x)).view(x.size(0), x.size(1), 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, width, heads, block, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(1, block, width))
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(6)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        return self.head(self.ln(self.blocks(self.tokens(ids) + self.positions))).flatten(0, 1)


def make_workload(name, small, rank, device):
    """The model, one batch for it, and whether it is for AdamW."""
    torch.manual_seed(0)
    batch = 4 if small else 1024 if name == "convnet" else 64
    if name == "convnet":
        model, shape, classes = ConvNet(), (batch, 1, 28, 28), 10
    elif name == "resnet50":
        classes, side = (10, 32) if small else (1000, 224)
        model, shape = ResNet50(8 if small else 64, classes), (batch, 3, side, side)
    else:
        block = 16 if small else 256
        model = Gpt(32 if small else 384, 2 if small else 6, block, 65)
        torch.manual_seed(100 + rank)
        data, target = torch.randint(65, (batch, block)), torch.randint(65, (batch * block,))
        return model.to(device), data.to(device), target.to(device), True
    torch.manual_seed(100 + rank)
    return model.to(device), torch.rand(*shape).to(device), torch.randint(classes, (batch,)).to(device), False


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_steps(step, steps, warmup, device):
    for _ in range(warmup):
        step()
    synchronize(device)
    together, times = 10 if device.type == "cuda" else 1, []
    for _ in range(0, steps, together):
        begin = time.monotonic()
        for _ in range(together):
            step()
        synchronize(device)
        times.append((time.monotonic() - begin) / together)
    return sorted(times)


def profile(path, device, step):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        synchronize(device)
    profiler.export_chrome_trace(path)


def make_step(system, model, data, target, precision, adamw, device):
    """The step, and DDP's module where there is one."""
    wrapped = model
    if system == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        wrapped._set_ddp_runtime_logging_sample_rate(1)
    fused = {"fused": True} if system == "captured" else {}
    if adamw:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-4, **fused)
    else:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9, **fused)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def forward():
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return F.cross_entropy(wrapped(data), target)

    def step():
        loss = forward()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    if system != "captured":
        return step, wrapped if system == "ddp" else None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss = forward()
        loss.backward()
        optimizer.step()
    return graph.replay, None


def train(rank, size, system, name, precision, small, steps, warmup, trace, device):
    model, data, target, adamw = make_workload(name, small, rank, device)
    step, ddp = make_step(system, model, data, target, precision, adamw, device)
    times = time_steps(step, steps, warmup, device)
    numbers = {"step": statistics.median(times), "low": times[(len(times) - 1) // 4], "high": times[3 * (len(times) - 1) // 4],
               "samples": len(data) * size,
               "peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_memory() * 1024}
    if ddp is not None:
        logged = ddp._get_ddp_logging_data()
        communication = logged.get("backward_comm_time", 0) * 1e-9
        numbers |= {"communication": communication,
                    "exposed": communication - logged.get("backward_compute_comm_overlap_time", 0) * 1e-9}
    report(rank, **numbers)
    if trace:
        if rank == 0:
            profile(trace, device, step)
        else:
            step()
            synchronize(device)


def time_collectives(rank, size, smallest, largest, device):
    nbytes = smallest
    while nbytes <= largest:
        count = nbytes // 4 // size * size
        whole, rows, row = (torch.zeros(n, device=device) for n in (count, count, count // size))
        others = torch.zeros_like(rows)
        calls = {"all_reduce": lambda: dist.all_reduce(whole),
                 "all_gather": lambda: dist.all_gather_into_tensor(rows, row),
                 "reduce_scatter": lambda: dist.reduce_scatter_tensor(row, rows),
                 "broadcast": lambda: dist.broadcast(whole, 0),
                 "reduce": lambda: dist.reduce(whole, 0),
                 "all_to_all": lambda: dist.all_to_all_single(others, rows)}
        if size > 1:  # from rank 0 to rank 1; other ranks wait at the barrier
            calls["send_recv"] = lambda: dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0) if rank == 1 else None
        for name, call in calls.items() if count else ():
            together, times = 20 if nbytes <= 1 << 20 else 5, []
            for repeat in range(6):
                dist.barrier()
                synchronize(device)
                begin = time.monotonic()
                for _ in range(together):
                    call()
                synchronize(device)
                if repeat > 0:
                    times.append((time.monotonic() - begin) / together)
            report(rank, collective=name, bytes=count * 4, seconds=statistics.median(times))
        nbytes *= 4


def main(words):
    on_gpu = os.environ.get("LOCKSTEP_DEVICE", "auto") != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()) if on_gpu else \
        torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    alone = words[0] in ("bare", "captured")
    rank, size = 0, 1
    if not alone:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
    if words[0] == "collectives":
        time_collectives(rank, size, int(words[1]), int(words[2]), device)
    else:
        system, name, precision, extent, steps, warmup = words[:6]
        train(rank, size, system, name, precision, extent == "small", int(steps), int(warmup),
              words[6] if len(words) > 6 else "", device)
    if not alone:
        dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
