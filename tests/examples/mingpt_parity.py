"""Trains examples/mingpt's model in Python DDP as well and compares every loss of rank 0 and the trained parameters, bit for bit.

mingpt_parity.py MINGPT_PROGRAM SHARED_FOLDER [--steps 50] [--svg FILE] [--speed ROUNDS]
The folder holds data/tinyshakespeare.txt. Exit code 77: skipped. --svg plots both loss curves; --speed times both sides,
alternating, and prints tokens per CPU second.

Both sides: 2 Gloo ranks of one thread, fp32, the same text, seed and settings; once without dropout and once with dropout 0.1,
whose draws are equal as well. No initial state is exchanged: both construct the modules and draw the initial values in the same
order from the same seed. Two things in C++ are lockstep's own for the sake of these bits: lockstep::Linear, as torch::nn::Linear
rounds differently for inputs [N, T, C], and lockstep::AdamW, as torch::optim::AdamW rounds differently.
"""
import argparse
import math
import os
import resource
import statistics
import sys
import tempfile
import warnings

from parity import dist, run_forked, run_program, run_python, skip, torch

arguments = argparse.ArgumentParser()
arguments.add_argument("program")
arguments.add_argument("shared", nargs="?", default="")
arguments.add_argument("--steps", type=int, default=50)
arguments.add_argument("--svg")
arguments.add_argument("--speed", type=int)
arguments = arguments.parse_args()
TEXT = os.path.join(arguments.shared, "data", "tinyshakespeare.txt")
if not (arguments.shared and os.path.isfile(TEXT)):
    skip("no tiny Shakespeare (set LOCKSTEP_SHARED to a folder with data/tinyshakespeare.txt)")

from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

RANKS, EPOCHS, SEED, RATE, DECAY, CLIP = 2, 2, 3407, 3e-4, 0.1, 1.0


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_drop = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.c_attn(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.resid_drop(self.c_proj(y.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.ln2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)
        self.resid_drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.resid_drop(self.c_proj(F.gelu(self.c_fc(self.ln2(x)))))


class Gpt(nn.Module):
    def __init__(self, characters, block, layers, heads, width, dropout):
        super().__init__()
        self.tok_emb = nn.Embedding(characters, width)
        self.pos_emb = nn.Parameter(torch.zeros(1, block, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0, 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, 0, 0.02 / math.sqrt(2 * layers))

    def forward(self, ids):
        x = self.drop(self.tok_emb(ids) + self.pos_emb[:, : ids.size(1)])
        return self.head(self.ln_f(self.blocks(x)))


class Characters(Dataset):
    def __init__(self, path, block):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        characters = sorted(set(text))
        number = {character: i for i, character in enumerate(characters)}
        self.ids = torch.tensor([number[character] for character in text])
        self.block, self.characters = block, len(characters)

    def __len__(self):
        return len(self.ids) - self.block

    def __getitem__(self, i):
        return self.ids[i : i + self.block], self.ids[i + 1 : i + 1 + self.block]


def decay_groups(model):
    decayed = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return [
        {"params": [p for p in model.parameters() if p in decayed], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p not in decayed], "weight_decay": 0.0},
    ]


def train(rank, ranks, output, text, size, batch, dropout):
    data = Characters(text, size["block"])
    torch.manual_seed(SEED)
    model = Gpt(data.characters, **size, dropout=dropout)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=RATE, betas=(0.9, 0.95))
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch, sampler=sampler)
    torch.manual_seed(SEED + rank)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.item())
    if rank == 0:
        torch.save({"losses": losses, "state": model.state_dict()}, f"{output}/python.pt")


def python(scratch, name, *args):
    # torch runs in forked processes only, so that each starts afresh
    run_forked(run_python, RANKS, train, f"{scratch}/{name}", *args)
    return torch.load(f"{scratch}/{name}/python.pt")


def cpp(scratch, name, text, size, batch, dropout):
    snapshot, losses = f"{scratch}/{name}.snapshot.pt", f"{scratch}/{name}.losses"
    keys = {
        "gpt_config.n_layer": size["layers"], "gpt_config.n_head": size["heads"], "gpt_config.n_embd": size["width"],
        "gpt_config.embd_pdrop": dropout, "gpt_config.resid_pdrop": dropout, "gpt_config.attn_pdrop": dropout,
        "data_config.block_size": size["block"], "data_config.train_split": 1, "trainer_config.batch_size": batch,
        "trainer_config.max_epochs": EPOCHS, "trainer_config.save_every": EPOCHS, "trainer_config.seed": SEED,
        "trainer_config.grad_norm_clip": CLIP, "trainer_config.snapshot_path": snapshot,
        "trainer_config.loss_path": losses, "optimizer_config.learning_rate": RATE,
        "optimizer_config.weight_decay": DECAY, "sample_config.number": 0,
    }
    run_program(arguments.program, "--nproc", RANKS, "--data-path", text, *(f"{k}={v}" for k, v in keys.items()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = dict(torch.jit.load(snapshot).checkpoint_model.named_parameters())
    with open(losses) as file:
        return {
            "losses": [float(line) for line in file],
            "state": state,
        }


def excerpt(scratch, steps, size, batch):
    """The text's begin, as long as `steps` steps in all."""
    with open(TEXT, encoding="utf-8") as file:
        text = file.read()[: steps // EPOCHS * RANKS * batch + size["block"]]
    path = f"{scratch}/text.txt"
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def compare(scratch, dropout):
    size, batch = dict(block=32, layers=2, heads=4, width=64), 16
    text = excerpt(scratch, arguments.steps, size, batch)
    ours = cpp(scratch, f"dropout{dropout}", text, size, batch, dropout)
    theirs = python(scratch, f"dropout{dropout}", text, size, batch, dropout)
    if len(ours["losses"]) != arguments.steps or len(theirs["losses"]) != arguments.steps:
        sys.exit(f"FAILED: {len(ours['losses'])} and {len(theirs['losses'])} losses of {arguments.steps} steps")
    # The program writes nine digits, which tell any two float32 apart.
    for step, (own, other) in enumerate(zip(ours["losses"], theirs["losses"])):
        if f"{own:.9g}" != f"{other:.9g}":
            sys.exit(f"FAILED: dropout {dropout}: step {step}: loss {own:.9g}, Python's {other:.9g}")
    if not theirs["losses"][-1] < theirs["losses"][0] - 0.1:
        sys.exit(f"FAILED: the loss went from {theirs['losses'][0]} to {theirs['losses'][-1]}: nothing was learned")
    if ours["state"].keys() != theirs["state"].keys():
        sys.exit(f"FAILED: the models differ: {ours['state'].keys() ^ theirs['state'].keys()}")
    for name, value in theirs["state"].items():
        if not torch.equal(value, ours["state"][name]):
            sys.exit(f"FAILED: dropout {dropout}: {name} differs by {(value - ours['state'][name]).abs().max()}")
    print(f"| minGPT at {RANKS} ranks, {arguments.steps} steps of AdamW, dropout {dropout} | loss {theirs['losses'][0]:.9g} to "
          f"{theirs['losses'][-1]:.9g} | same bits in all {arguments.steps} losses and {len(ours['state'])} tensors |",
          flush=True)
    return ours["losses"], theirs["losses"]


def plot(path, ours, theirs):
    """Both curves as SVG: Python's as a wide band, lockstep's as a thin line on it."""
    width, height, left, top, bottom = 720, 360, 60, 40, 50
    low, high = math.floor(min(ours + theirs)), math.ceil(max(ours + theirs))
    x = lambda step: left + step / (len(ours) - 1) * (width - left - 20)
    y = lambda loss: height - bottom - (loss - low) / (high - low) * (height - top - bottom)
    line = lambda losses: " ".join(f"{x(i):.1f},{y(loss):.1f}" for i, loss in enumerate(losses))
    text = lambda at, down, words, more="": f'<text x="{at:.1f}" y="{down:.1f}" {more}>{words}</text>'
    grid = [f'<line x1="{left}" x2="{width - 20}" y1="{y(n):.1f}" y2="{y(n):.1f}" stroke="#ddd"/>'
            + text(left - 8, y(n) + 4, n, 'text-anchor="end"') for n in range(low, high + 1)]
    ticks = [text(x(n), height - bottom + 18, n, 'text-anchor="middle"')
             for n in range(0, len(ours), max(1, len(ours) // 5))]
    with open(path, "w") as file:
        file.write("\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>', *grid, *ticks,
            f'<polyline points="{line(theirs)}" fill="none" stroke="#f2a65a" stroke-width="6" stroke-linejoin="round"/>',
            f'<polyline points="{line(ours)}" fill="none" stroke="#1b4b8f" stroke-width="1.5"/>',
            text(left, 22, f"minGPT on tiny Shakespeare, {RANKS} ranks: training loss of rank 0", 'font-size="14"'),
            text(width / 2, height - 12, "step", 'text-anchor="middle"'),
            text(width - 260, top + 10, "Python DDP (wide)", 'fill="#c8741c"'),
            text(width - 130, top + 10, "lockstep (thin)", 'fill="#1b4b8f"'), "</svg>", ""]))


def cpu_seconds(work):
    """Of the processes that `work` starts and waits for."""
    total = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    before = total()
    work()
    return total() - before


def speed(scratch, rounds):
    """Tokens per CPU second, both sides alternating, in a model of the size of minGPT's gpt-micro. A run of 20 steps is
    subtracted from one of 60, which leaves 40 steps without start and end. CPU time, as wall time on a busy machine says little."""
    size, batch, short, long = dict(block=64, layers=4, heads=4, width=128), 16, 20, 60
    tokens = (long - short) * RANKS * batch * size["block"]
    ratios = []
    for i in range(rounds):
        rates = []
        for name, side in (("lockstep", cpp), ("Python", python)):
            seconds = [
                cpu_seconds(lambda: side(scratch, f"{name}{i}.{steps}", excerpt(scratch, steps, size, batch), size, batch, 0.0))
                for steps in (short, long)
            ]
            rates.append(tokens / (seconds[1] - seconds[0]))
        ratios.append(rates[0] / rates[1])
        print(f"round {i + 1}: lockstep {rates[0]:.0f}, Python {rates[1]:.0f} tokens per CPU second, ratio {ratios[-1]:.3f}",
              flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")


def main():
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.speed:
            return speed(scratch, arguments.speed)
        print("| behaviour | Python | lockstep |\n|---|---|---|")
        for dropout in (0.0, 0.1):
            curves = compare(scratch, dropout)
            if arguments.svg and dropout == 0:
                plot(arguments.svg, *curves)


if __name__ == "__main__":
    main()
