"""Trains with the real Python DistributedDataParallel and with lockstep from the same state and data, and compares
parameters and buffers of every rank bit for bit, after the first step (before buckets are rebuilt), the second, the
third and the last.

usage: ddp_parity.py PROGRAM [few] [RANKS...]

few: one case of each kind, of 20 steps at most.

Afterwards lockstep is broken on purpose, and the comparison must find each way.
"""

import contextlib
import inspect
import itertools
import os
import shutil
import sys
import tempfile
import time

from parity import dist, raw, require_same_library, run_forked, run_program, run_python, torch, write
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

BATCH = 30
SHAPES = {"mlp": (64,), "small": (64,), "big": (256,), "convnet": (1, 12, 12), "branches": (64,), "table": (64,), "tied": (64,),
          "shared": (64,), "mixed": (64,), "complex": (64,), "recomputed": (64,), "repeated": (64,),
          "gpt": (64,)}  # fmt: skip
BATCHES = dict.fromkeys(SHAPES, 300) | {"mlp": 600, "convnet": 200}
EARLIER = 7  # steps that each rank has less than the one before it, with "join"
IGNORED = ["2.weight", "2.bias"]
TOKENS, LENGTH, WIDTH, HEADS = 50, 8, 64, 4  # of the gpt
RANK, START = 2, 10  # of PowerSGD's factors, and its first step
# Before PyTorch 2.13 `broadcast_buffers=False` still sent them at construction.
FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters

# By the word for each in a case. Older versions of PyTorch lack them.
BATCHING = {"batched": "batched_grad_copy", "lazy": "lazy_bucket_allocation"}

# name, model, zero_grad(set_to_none), micro batches (all but the last under no_sync), steps, rate, momentum, caps in
# bytes joined by commas (0: the default caps), what else differs from a plain DDP, joined by +, and the same in words
CASES = [
    ("plain-none", "mlp", 1, 1, 50, 0.1, 0.0, "16384", "-", "plain, `zero_grad(set_to_none=True)`"),
    ("momentum-zero", "mlp", 0, 1, 50, 0.05, 0.9, "16384", "-", "plain with momentum, `zero_grad(set_to_none=False)`"),
    ("accumulate-none", "mlp", 1, 3, 50, 0.05, 0.9, "16384", "-", "`no_sync`: three micro-batches"),
    ("accumulate-zero", "mlp", 0, 3, 50, 0.1, 0.0, "16384", "-", "`no_sync`, gradients kept defined"),
    ("convnet-none", "convnet", 1, 1, 50, 0.05, 0.9, "8192", "-", "convolutions; buffers from rank 0"),
    ("convnet-zero", "convnet", 0, 1, 50, 0.1, 0.0, "8192", "-", "convolutions, gradients kept defined"),
    ("convnet-local", "convnet", 1, 1, 50, 0.1, 0.0, "8192", "first-buffers", "convolutions, `forward_sync_buffers=False`"),
    ("convnet-alone", "convnet", 1, 1, 50, 0.1, 0.0, "8192", "no-buffers", "convolutions, `broadcast_buffers=False`"),
    ("default-caps", "big", 0, 1, 50, 0.05, 0.9, "0", "-", "29 MiB of parameters, default caps"),
    ("caps", "mlp", 1, 1, 50, 0.1, 0.9, "4096,16384,32768", "-", "`bucket_cap_mb_list`"),
    ("view-none", "mlp", 1, 1, 50, 0.1, 0.9, "16384", "view", "`gradient_as_bucket_view=True`"),
    ("view-zero", "mlp", 0, 1, 50, 0.1, 0.9, "16384", "view", "`gradient_as_bucket_view=True`, gradients kept defined"),
    ("view-accumulate-none", "mlp", 1, 3, 10, 0.1, 0.9, "16384", "view", "`gradient_as_bucket_view=True` with `no_sync`"),
    ("small-none", "small", 1, 1, 50, 0.1, 0.9, "4096", "-", "small parameters"),
    ("small-half", "small", 0, 1, 50, 0.05, 0.9, "4096", "half", "small parameters, every other gradient kept defined"),
    ("small-view", "small", 0, 1, 50, 0.05, 0.9, "4096", "view", "small parameters, `gradient_as_bucket_view=True`, gradients kept defined"),
    ("small-view-half", "small", 0, 1, 50, 0.05, 0.9, "4096", "view+half", "small parameters, `gradient_as_bucket_view=True`, every other gradient kept defined"),
    ("batched", "small", 1, 2, 50, 0.05, 0.9, "4096", "batched", "`batched_grad_copy=True` with `no_sync`"),
    ("batched-half", "mlp", 0, 1, 50, 0.05, 0.9, "16384", "batched+half", "`batched_grad_copy=True`, every other gradient kept defined"),
    ("batched-view", "small", 0, 1, 50, 0.05, 0.9, "4096", "batched+view+half", "the same with `gradient_as_bucket_view=True`"),
    ("lazy", "small", 1, 2, 50, 0.05, 0.9, "4096", "lazy", "`lazy_bucket_allocation=True` with `no_sync`"),
    ("lazy-zero", "mlp", 0, 1, 50, 0.05, 0.9, "16384", "lazy", "`lazy_bucket_allocation=True`, gradients kept defined"),
    ("lazy-view", "mlp", 1, 1, 50, 0.05, 0.9, "16384", "lazy+view", "`lazy_bucket_allocation=True`, `gradient_as_bucket_view=True`"),
    ("lazy-view-half", "small", 0, 1, 50, 0.05, 0.9, "4096", "lazy+view+half", "the same, every other gradient kept defined"),
    ("lazy-view-zero", "small", 0, 2, 50, 0.05, 0.9, "4096", "lazy+view", "the same with `no_sync`, gradients kept defined"),
    ("lazy-search", "branches", 1, 1, 50, 0.1, 0.9, "8192", "lazy+search", "`lazy_bucket_allocation=True`, `find_unused_parameters`"),
    ("lazy-view-search", "branches", 0, 2, 50, 0.1, 0.9, "8192", "lazy+view+search", "the same with `gradient_as_bucket_view=True`, `no_sync`, gradients kept defined"),
    ("lazy-view-half-search", "branches", 0, 1, 50, 0.1, 0.9, "12000", "lazy+view+search+half", "the same, every other gradient kept defined"),
    ("lazy-view-static", "branches", 1, 1, 50, 0.1, 0.9, "12000", "lazy+view+static", "the same with `static_graph`"),
    ("skip", "branches", 0, 2, 50, 0.1, 0.9, "8192", "skip+search+fixed", "`skip_all_reduce_unused_params=True`, `find_unused_parameters`"),
    ("skip-view", "branches", 0, 1, 50, 0.1, 0.9, "8192", "skip+view+search+fixed", "the same with `gradient_as_bucket_view=True`"),
    ("skip-static", "branches", 1, 1, 50, 0.1, 0.9, "8192", "skip+static+fixed", "the same with `static_graph`"),
    ("separate", "mlp", 0, 3, 50, 0.1, 0.9, "16384", "separate", "gradients in memory of their own"),
    ("frozen", "mlp", 1, 1, 50, 0.1, 0.9, "2048", "frozen", "a frozen layer"),
    ("tied", "tied", 1, 1, 50, 0.1, 0.9, "256", "-", "a layer used twice, registered twice"),
    ("search", "branches", 1, 1, 50, 0.1, 0.9, "8192", "search", "`find_unused_parameters`: branches that change"),
    ("search-zero", "branches", 0, 2, 50, 0.1, 0.9, "8192", "search", "`find_unused_parameters` with `no_sync`, gradients kept defined"),
    ("search-keep", "branches", 0, 1, 50, 0.02, 0.0, "8192", "search+keep", "`find_unused_parameters`, `zero_grad` every third step"),
    ("view-search-keep", "branches", 0, 1, 50, 0.02, 0.0, "8192", "view+search+keep", "the same with `gradient_as_bucket_view=True`"),
    ("search-alike", "branches", 0, 1, 20, 0.02, 0.0, "8192", "search+keep+alike", "`find_unused_parameters`, kept gradients that no rank uses"),
    ("view-search-alike", "branches", 0, 1, 20, 0.02, 0.0, "8192", "view+search+keep+alike", "the same with `gradient_as_bucket_view=True`"),
    ("twice", "mlp", 1, 1, 50, 0.05, 0.0, "16384", "twice", "two reduced backwards a step"),
    ("view-twice", "mlp", 0, 1, 50, 0.05, 0.0, "16384", "view+twice", "the same with `gradient_as_bucket_view=True`, gradients kept defined"),
    ("static", "branches", 1, 1, 50, 0.1, 0.9, "8192", "static", "`static_graph`: other branches on other ranks"),
    ("sparse", "table", 1, 1, 50, 0.5, 0.0, "2048", "-", "an embedding with sparse gradients"),
    ("last-none", "convnet", 1, 1, 50, 0.05, 0.9, "8192", "last", "convolutions in `channels_last`"),
    ("last-view", "convnet", 0, 1, 50, 0.1, 0.0, "8192", "last+view", "convolutions in `channels_last`, `gradient_as_bucket_view=True`, gradients kept defined"),
    ("ignored", "mlp", 1, 1, 50, 0.1, 0.9, "2048", "ignored", "ignored parameters, which differ from rank to rank"),
    ("recomputed", "recomputed", 1, 1, 50, 0.1, 0.9, "256", "-", "`checkpoint(use_reentrant=True)`"),
    ("recomputed-zero", "recomputed", 0, 2, 50, 0.1, 0.0, "256", "view", "the same with `no_sync`, `gradient_as_bucket_view=True`, gradients kept defined"),
    ("repeated", "repeated", 1, 1, 50, 0.1, 0.9, "256", "static", "a layer in two re-entrant checkpoints, `static_graph`"),
    ("shared", "shared", 1, 1, 50, 0.1, 0.9, "256", "search", "a tied layer used twice, once or not at all, `find_unused_parameters`"),
    ("mixed", "mixed", 1, 1, 50, 0.1, 0.9, "256", "-", "parameters in float32 and float64"),
    ("complex", "complex", 1, 1, 50, 0.1, 0.9, "256", "-", "complex parameters"),
    ("complex-view", "complex", 0, 1, 50, 0.1, 0.0, "256", "view", "complex parameters, `gradient_as_bucket_view=True`, gradients kept defined"),
    ("group", "convnet", 1, 1, 50, 0.1, 0.9, "8192", "group", "a process group of the first and the last rank, and one of the others"),
    ("join", "mlp", 1, 1, 50, 0.1, 0.0, "16384", "join", "`join()`, as ranks run out of data one after the other; `backward_empty()`"),
    ("fp16", "mlp", 1, 1, 50, 0.1, 0.9, "16384", "fp16", "`fp16_compress_hook`"),
    ("bf16", "mlp", 0, 1, 50, 0.1, 0.9, "16384", "bf16", "`bf16_compress_hook`"),
    ("power-sgd", "gpt", 1, 1, 15, 0.1, 0.9, "262144,8192", "power-sgd", "`powerSGD_hook` without error feedback, rank 2 from step 10 on, a GPT of two layers"),
    ("power-sgd-feedback", "gpt", 1, 1, 15, 0.1, 0.9, "262144,8192", "power-sgd+feedback", "the same with error feedback, but for the errors of what is not compressed, which lockstep does not keep"),
    ("gpt", "gpt", 1, 4, 40, 3e-3, 0.0, "65536", "adamw", "a GPT of two layers, its head tied: `AdamW` with two groups, clipping, cosine, `no_sync`: four micro-batches"),
]
if not FORWARD_SYNC:
    CASES = [case for case in CASES if case[8] != "no-buffers"]
OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
CASES = [case for case in CASES if all(o in OPTIONS for w, o in BATCHING.items() if w in case[8].split("+"))]
if "few" in sys.argv:
    FEW = ("plain-none", "small-none", "small-view-half", "batched", "batched-view", "lazy-zero", "lazy-view-half", "lazy-search", "skip", "accumulate-zero", "convnet-zero", "convnet-alone", "caps", "view-zero", "tied", "search-keep", "view-search-alike", "twice",
           "static", "sparse", "last-view", "ignored", "recomputed", "repeated", "shared", "mixed", "complex-view", "group", "join",
           "fp16", "power-sgd-feedback", "gpt")  # fmt: skip
    CASES = [(*case[:4], min(case[4], 20), *case[5:]) for case in CASES if case[0] in FEW]


def make_model(name):
    from torch import nn

    class Branches(nn.Module):
        """Every step another of two branches or none, and one that nobody takes."""

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 48)
            self.branches = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
            self.last = nn.Linear(48, 10)

        def forward(self, x, which):
            x = torch.relu(self.first(x))
            if which < 2:
                x = torch.relu(self.branches[which](x))
            return self.last(x)

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 16, sparse=True)
            self.hidden = nn.Linear(16, 64)
            self.last = nn.Linear(64, 10)

        def forward(self, x, which):
            rows = (x.abs() * 10).long() % 50
            return self.last(torch.relu(self.hidden(self.table(rows).mean(1))))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.again = self.first
            self.last = nn.Linear(64, 10)

        def forward(self, x, which):
            return self.last(torch.relu(self.again(torch.relu(self.first(x)))))

    class Middle(nn.Module):
        """Two layers and one between them, of which `name` tells what it is."""

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 48)
            self.middle = nn.Linear(48, 48)
            if name == "shared":
                self.again = self.middle
            self.last = nn.Linear(48, 10)
            if name == "mixed":
                self.middle.double()
            if name == "complex":
                self.to(torch.complex64)
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter.mul_(1 + 0.5j)

        def forward(self, x, which):
            if name == "complex":
                return self.last(torch.tanh(self.middle(torch.tanh(self.first(x.cfloat()))))).abs()
            x = torch.relu(self.first(x))
            if name == "mixed":
                x = torch.relu(self.middle(x.double())).float()
            elif name == "shared":
                for _ in range(which, 2):
                    x = torch.relu(self.again(x))
            else:
                for _ in range(2 if name == "repeated" else 1):
                    x = torch.relu(checkpoint(self.middle, x, use_reentrant=True))
            return self.last(x)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(WIDTH)
            self.attention = nn.Linear(WIDTH, 3 * WIDTH)
            self.projection = nn.Linear(WIDTH, WIDTH)
            self.norm2 = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            parts = self.attention(self.norm1(x)).split(WIDTH, 2)
            q, k, v = (part.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
            heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.projection(heads.transpose(1, 2).contiguous().view(x.shape))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(TOKENS, WIDTH)
            self.wpe = nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.Sequential(Block(), Block())
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, TOKENS, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, x, which):
            tokens = (x[:, :LENGTH].abs() * 10).long() % TOKENS
            x = self.wte(tokens) + self.wpe(torch.arange(LENGTH))
            return self.head(self.norm(self.blocks(x))).mean(1)

    class Plain(nn.Sequential):
        def forward(self, x, which):
            return super().forward(x)

    if name in ("branches", "table", "tied", "gpt"):
        return {"branches": Branches, "table": Table, "tied": Tied, "gpt": Gpt}[name]()
    if name in ("shared", "mixed", "complex", "recomputed", "repeated"):
        return Middle()
    if name == "small":
        hidden = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.ReLU())]
        return Plain(nn.Linear(64, 16), nn.ReLU(), *hidden, nn.Linear(16, 10))
    if name == "mlp":
        return Plain(
            nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10)
        )
    if name == "big":
        return Plain(
            nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1280), nn.ReLU(),
            nn.Linear(1280, 256), nn.ReLU(), nn.Linear(256, 10),
        )  # fmt: skip
    return Plain(
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(288, 10),
    )  # fmt: skip


def state_bytes(model):
    return b"".join(map(raw, itertools.chain(model.parameters(), model.buffers())))


def write_inputs(folder):
    for name, shape in SHAPES.items():
        torch.manual_seed(len(name))
        write(f"{folder}/{name}.state", state_bytes(make_model(name)))
        inputs = torch.randn(BATCHES[name], BATCH, *shape)
        labels = torch.randint(10, (BATCHES[name], BATCH))
        write(f"{folder}/{name}.inputs", raw(inputs))
        write(f"{folder}/{name}.labels", raw(labels))
    torch.set_num_threads(1)
    write(f"{folder}/linear", b"equal bits" if compare_linear() else b"other bits")


def compare_linear():
    """Whether a product and a sum have the bits of `linear` on this processor, for the longest rows of the gpt."""
    x, weight, bias = torch.randn(BATCH, LENGTH, 4 * WIDTH), torch.randn(WIDTH, 4 * WIDTH), torch.randn(WIDTH)
    return torch.nn.functional.linear(x, weight, bias).equal(x.matmul(weight.t()) + bias)


def write_cases(folder, cases):
    with open(f"{folder}/cases", "w") as file:
        for case in cases:
            print(*case[:9], file=file)  # without the words


def power_sgd(state, bucket):
    """Python's hook, waited for: its later collectives start on a thread of Gloo's, in an order that two buckets under
    way at once would leave to chance. Errors of what is not compressed are forgotten."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    if bucket.index() in state.error_dict:
        gradients = bucket.gradients()
        errors = state.error_dict[bucket.index()].split([gradient.numel() for gradient in gradients])
        for gradient, error in zip(gradients, errors):
            n, m = gradient.shape[0], gradient.numel() // gradient.shape[0]
            if 2 * (n + m) * min(n, m, RANK) >= n * m:
                error.zero_()
    return future


def wrap(model, caps, extra):
    """The real DDP with what the case names."""
    caps = [int(cap) / 2**20 for cap in caps.split(",")]
    options = {"bucket_cap_mb": caps[0] or None} if len(caps) == 1 else {"bucket_cap_mb_list": caps}
    if extra == "no-buffers":
        options["broadcast_buffers"] = False
    if extra == "first-buffers" and FORWARD_SYNC:
        options["forward_sync_buffers"] = False
    elif extra == "first-buffers":
        options["broadcast_buffers"] = False
    for word, option in BATCHING.items():
        if word in extra:
            options[option] = True
    if "group" in extra:
        size = dist.get_world_size()
        ends = dist.new_group([0, size - 1])
        middle = dist.new_group(list(range(1, size - 1))) if size > 2 else None
        options["process_group"] = ends if dist.get_rank() in (0, size - 1) else middle
    if "ignored" in extra:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, IGNORED)
    ddp = DistributedDataParallel(
        model,
        find_unused_parameters="search" in extra,
        static_graph="static" in extra,
        gradient_as_bucket_view="view" in extra,
        skip_all_reduce_unused_params="skip" in extra,
        **options,
    )
    if extra in ("fp16", "bf16"):
        ddp.register_comm_hook(None, getattr(default_hooks, f"{extra}_compress_hook"))
    if "power-sgd" in extra:
        state = powerSGD_hook.PowerSGDState(None, RANK, START, use_error_feedback="feedback" in extra)
        ddp.register_comm_hook(state, power_sgd)
    return ddp


def train(case, rank, output, folder):
    name, model_name, set_to_none, micro_batches, steps, rate, momentum, caps, extra, _ = case
    torch.manual_seed(len(model_name))
    model = make_model(model_name)
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.add_(rank)
    if extra == "frozen":
        for parameter in list(model.parameters())[2:4]:
            parameter.requires_grad_(False)
    if "last" in extra:
        model.to(memory_format=torch.channels_last)
    read = lambda end, dtype: torch.frombuffer(bytearray(open(f"{folder}/{model_name}.{end}", "rb").read()), dtype=dtype)
    x = read("inputs", torch.float32).view(BATCHES[model_name], BATCH, *SHAPES[model_name])
    y = read("labels", torch.int64).view(BATCHES[model_name], BATCH)
    ddp = wrap(model, caps, extra)
    ignored = IGNORED if "ignored" in extra else []
    trained = [p for n, p in model.named_parameters() if p.requires_grad and n not in ignored]
    if extra == "adamw":
        groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
                  {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    else:
        optimizer = torch.optim.SGD(trained, lr=rate, momentum=momentum)
        schedule = None

    def backward(step, micro):
        batch = ((step * micro_batches + micro) * 4 + rank) % len(y)
        which = (0 if "fixed" in extra else rank if "static" in extra else step if "alike" in extra else step + rank) % 3
        inputs = x[batch].to(memory_format=torch.channels_last) if "last" in extra else x[batch]
        loss = torch.nn.functional.cross_entropy(ddp(inputs, which), y[batch])
        (loss / micro_batches if extra == "adamw" else loss).backward()

    def train_step(step):
        if "keep" not in extra or step % 3 == 0:
            optimizer.zero_grad(set_to_none=bool(set_to_none))
        if "half" in extra:
            for parameter in trained[::2]:
                parameter.grad = None
        with ddp.no_sync():
            for micro in range(micro_batches - 1):
                backward(step, micro)
        backward(step, micro_batches - 1)
        if "twice" in extra:
            backward(step + 1, 0)
        if extra == "adamw":
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if schedule:
            schedule.step()

    joining = ddp.join() if "join" in extra else contextlib.nullcontext()
    with joining:
        for step in range(steps - (EARLIER * rank if "join" in extra else 0)):
            train_step(step)
            if step < 3:
                write(f"{output}/{name}.{step + 1}.{rank}", state_bytes(model))
    write(f"{output}/{name}.{steps}.{rank}", state_bytes(model))


def sizes():
    """The numbers of ranks to compare at."""
    return [int(word) for word in sys.argv[2:] if word != "few"] or [2, 3, 4]


def cases_at(ranks):
    """The GPT's forty steps are the slowest by far, and show at one number of ranks what they are to show."""
    return [case for case in CASES if ranks == sizes()[0] or case[0] != "gpt"]


def train_all(rank, ranks, output, folder):
    for case in cases_at(ranks):
        train(case, rank, output, folder)


def run_lockstep(program, ranks, folder, output, *mutation):
    """The number of buckets in each case."""
    os.makedirs(output)
    printed = run_program(program, "--nproc", ranks, folder, output, *mutation)
    return {line.split()[0]: int(line.split()[-1]) for line in printed.splitlines() if " buckets " in line}


def differences(case, ranks, theirs, ours):
    """The steps and ranks whose states differ, in words."""
    name, steps = case[0], case[4]
    for step, rank in itertools.product(sorted({1, 2, 3, steps}), range(ranks)):
        expected = open(f"{theirs}/{name}.{step}.{rank}", "rb").read()
        actual = open(f"{ours}/{name}.{step}.{rank}", "rb").read()
        if expected != actual:
            wrong = sum(expected[i : i + 4] != actual[i : i + 4] for i in range(0, len(expected), 4))
            yield f"{name}: {wrong} of {len(expected) // 4} words differ at step {step} on rank {rank} of {ranks}"


def main():
    program = sys.argv[1]
    require_same_library(program)
    failures = 0
    table = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-parity-") as folder:
        os.makedirs(f"{folder}/in")
        run_forked(write_inputs, f"{folder}/in")
        for ranks in sizes():
            start = time.monotonic()
            theirs, ours = f"{folder}/python-{ranks}", f"{folder}/lockstep-{ranks}"
            write_cases(f"{folder}/in", cases_at(ranks))
            run_python(ranks, train_all, theirs, f"{folder}/in")
            middle = time.monotonic()
            buckets = run_lockstep(program, ranks, f"{folder}/in", ours)
            for case in cases_at(ranks):
                found = list(differences(case, ranks, theirs, ours))
                failures += bool(found)
                print(f"{ranks} ranks, {case[0]}, {buckets[case[0]]} buckets, {case[4]} steps:",
                      found[0] if found else "equal bits")  # fmt: skip
                table.setdefault(case, []).append((ranks, buckets[case[0]], not found))
                if buckets[case[0]] < 3:
                    failures += 1
                    print("  that is fewer than three buckets")
            print(f"{ranks} ranks: Python {middle - start:.1f} s, lockstep {time.monotonic() - middle:.1f} s", flush=True)
            # The comparison finds what is broken. At two ranks an order changes no bit: a + b = b + a.
            for mutation in ("off", "skip", "swap", "permute", "linear"):
                if ranks != {"permute": 3}.get(mutation, sizes()[0]):
                    continue
                case = CASES[-1 if mutation == "linear" else 0]
                write_cases(f"{folder}/in", [case])
                broken = f"{folder}/{mutation}"
                run_lockstep(program, ranks, f"{folder}/in", broken, mutation)
                found = list(differences(case, ranks, theirs, broken))
                if mutation == "linear" and open(f"{folder}/in/linear").read() == "equal bits":
                    found = found or ["equal bits on this processor, in Python as well"]
                failures += not found
                print(f"{ranks} ranks, broken by {mutation}:", found[0] if found else "NOT FOUND", flush=True)
            shutil.rmtree(theirs)
    print("\n| behaviour | Python | lockstep |\n|---|---|---|")
    for case, results in table.items():
        counts = sorted({count for _, count, _ in results})
        bits = "same bits" if all(same for *_, same in results) else "OTHER BITS"
        steps = case[4]
        print(f"| {case[9]} | {steps} steps at {', '.join(str(r[0]) for r in results)} ranks, "
              f"{'/'.join(map(str, counts))} buckets | {bits} after 1, 2, 3 and {steps} steps |")  # fmt: skip
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
