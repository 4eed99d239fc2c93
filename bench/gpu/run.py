"""Measures lockstep on GPUs beside Python DDP, in one run, and writes tables and a picture of one step.

run.py CONFIG [--device auto|cuda|cpu] [--ranks 1 2] [--rounds 3] [--size full|small] [--only training,overhead,...]
       [--write FILE.md] [--picture FILE.svg]

CONFIG is written by CMake (bench/gpu/CMakeLists.txt). Each round runs every program once, A B C A B C ..., so that what
else the machine does meets all of them; a ratio is taken within a round. FILE.md gets the tables between its two lines
"<!-- bench-gpu: begin -->" and "<!-- bench-gpu: end -->", or becomes a page of its own where it is not there yet.
"""
import argparse
import ctypes
import datetime
import html
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from command import first_line

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import record

BEGIN, END = "<!-- bench-gpu: begin -->", "<!-- bench-gpu: end -->"
PARTS = ("training", "overhead", "captured", "collectives", "picture")


class Skipped(Exception):
    """A measurement that this machine cannot make; its text is the reason."""


class Bench:
    def __init__(self, config, given):
        self.config, self.given = config, given
        self.gpus = self.count_gpus() if given.device != "cpu" else 0
        if given.device == "cuda" and self.gpus == 0:
            sys.exit("run.py: --device cuda, but nvidia-smi lists no GPU")
        self.on_gpu = self.gpus > 0
        self.size = given.size or ("full" if self.on_gpu else "small")
        self.steps, self.warmup = (given.steps or (100 if self.on_gpu else 6)), (20 if self.on_gpu else 2)
        self.skipped = []

    @staticmethod
    def count_gpus():
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            return 0
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())

    def default_ranks(self):
        """Two ranks share a single GPU where NCCL can do that: one rank has no communication to measure."""
        if not self.on_gpu:
            return [2]
        return [1, 2] if self.gpus == 1 and self.nccl_version() >= 23000 else sorted({1, self.gpus})

    def nccl_version(self):
        version = ctypes.c_int()
        try:
            ctypes.CDLL(self.config["nccl"] or "libnccl.so.2").ncclGetVersion(ctypes.byref(version))
        except OSError as error:
            print(f"no NCCL is found, so each rank gets a GPU of its own: {error}", flush=True)
        return version.value

    def precisions(self):
        return ("fp32", "tf32", "bf16", "fp16") if self.on_gpu else ("fp32", "bf16")

    def environment(self, ranks, system):
        added = {"LOCKSTEP_DEVICE": "gpu" if self.on_gpu else "cpu"}
        if not self.on_gpu:
            added["OMP_NUM_THREADS"] = "1"
        elif ranks > self.gpus:
            added["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if self.on_gpu and system == "python" and self.config["nccl"]:
            added["LD_PRELOAD"] = self.config["nccl"]  # where that is not the one that torch itself would load
        return {**os.environ, **added}

    def run(self, system, ranks, words):
        """The reports of all ranks, for one start of a system: lockstep or python."""
        if system == "lockstep":
            command = [self.config["program"], "--nproc", str(ranks), *words]
        elif not self.config["python"]:
            raise Skipped("no Python with the torch package that lockstep is built against")
        else:
            script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "training.py")
            command = [self.config["python"], script, *words] if words[0] in ("bare", "captured") else [
                self.config["python"], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script,
                *words]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, env=self.environment(ranks, system), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, timeout=self.given.timeout)
        except subprocess.TimeoutExpired:
            raise Skipped(f"{' '.join(command)}: no end after {self.given.timeout} s") from None
        reports = [json.loads(found) for found in re.findall(r"BENCH (\{.*?\})", done.stdout)]
        print(f"{time.monotonic() - begin:6.1f} s  {system} x{ranks} {' '.join(words[:4])}", flush=True)
        if done.returncode != 0 or not reports:
            tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise Skipped(f"{' '.join(command)}: exit code {done.returncode}: {tail}")
        return reports

    def attempt(self, what, work):
        """work(), or None where it is skipped, which is noted once."""
        try:
            return work()
        except Skipped as reason:
            self.skipped.append(f"{what}: {reason}")
            print(f"SKIPPED {what}: {reason}", flush=True)
            return None

    def rounds(self, systems):
        """Samples by system: `systems` maps a name to what gives one; each round takes all in turn."""
        samples = {}
        for number in range(self.given.rounds):
            for name, work in systems.items():
                if number == 0 or name in samples:
                    sample = self.attempt(name, work)
                    if sample is not None:
                        samples.setdefault(name, []).append(sample)
        return samples

    def step_of(self, system, kind, model, precision, ranks, trace=None):
        words = [kind, model, precision, self.size, str(self.steps), str(self.warmup)] + ([trace] if trace else [])
        reports = self.run(system, ranks, words)
        worst = max(reports, key=lambda report: report["step"])
        return {**worst, "peak": max(report["peak"] for report in reports)}


def middle(samples, key="step"):
    return statistics.median(sample[key] for sample in samples)


def ratio(mine, theirs, key="step"):
    ratios = [a[key] / b[key] for a, b in zip(mine, theirs)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def training(bench):
    """Step time, samples/s and peak memory of each system, model and precision."""
    lines = ["| model | precision | ranks | system | step, ms (quartiles) | samples/s | peak memory, MiB | step / Python's |",
             "|---|---|---|---|---|---|---|---|"]
    for ranks in bench.given.ranks:
        for model in bench.given.models:
            for precision in bench.precisions():
                if bench.given.precisions and precision not in bench.given.precisions:
                    continue
                name = f"{model} {precision} on {ranks}"
                systems = {f"Python DDP, {name}": ("python", "ddp"), f"lockstep, {name}": ("lockstep", "ddp"),
                           f"lockstep over ProcessGroupComm, {name}": ("lockstep", "process-group")}
                samples = bench.rounds({
                    label: (lambda system=system, kind=kind: bench.step_of(system, kind, model, precision, ranks))
                    for label, (system, kind) in systems.items()})
                python = samples.get(f"Python DDP, {name}")
                for label, found in samples.items():
                    worst = sorted(found, key=lambda sample: sample["step"])[len(found) // 2]
                    against = ratio(found, python) if python and found is not python else ""
                    lines.append(f"| {model} | {precision} | {ranks} | {label.split(',')[0]} | {1e3 * middle(found):.3f} "
                                 f"({1e3 * worst['low']:.3f}-{1e3 * worst['high']:.3f}) | "
                                 f"{worst['samples'] / middle(found):,.0f} | {middle(found, 'peak') / 2**20:,.0f} | {against} |")
    return "Training", lines


class Compared:
    """Steps of several kinds of (system, kind), of one model in fp32 in one process."""

    def __init__(self, bench, model, kinds):
        samples = bench.rounds({
            f"{system} {kind}, {model}": (lambda system=system, kind=kind: bench.step_of(system, kind, model, "fp32", 1))
            for system, kind in kinds})
        self.found = {key.split(",")[0]: value for key, value in samples.items()}

    def over(self, one, other):
        both = one in self.found and other in self.found
        return ratio(self.found[one], self.found[other]) if both else "not measured"

    def times(self, *names):
        return ", ".join(f"{1e3 * middle(self.found[name]):.3f}" if name in self.found else "-" for name in names)


def overhead(bench):
    """What the wrapper costs in one process, over a loop without it."""
    lines = ["| model | lockstep's wrapper over a bare loop | the same without communicator (LocalComm) | Python's DDP over a bare loop | "
             "bare loop, ms: C++, Python |", "|---|---|---|---|---|"]
    for model in bench.given.models:
        steps = Compared(bench, model, (("lockstep", "bare"), ("lockstep", "ddp"), ("lockstep", "local"), ("python", "bare"),
                                        ("python", "ddp")))
        lines.append(f"| {model} | {steps.over('lockstep ddp', 'lockstep bare')} | "
                     f"{steps.over('lockstep local', 'lockstep bare')} | {steps.over('python ddp', 'python bare')} | "
                     f"{steps.times('lockstep bare', 'python bare')} |")
    return "Overhead of the wrapper at one process", lines


def captured(bench):
    """The captured step beside the plain one, and Python with and without a CUDA graph."""
    if not bench.on_gpu:
        raise Skipped("a captured step needs a GPU")
    lines = ["| model | lockstep captured / plain | Python's graph / plain | lockstep captured / Python's graph | ms: captured, plain, "
             "Python's graph, Python plain |", "|---|---|---|---|---|"]
    for model in [model for model in bench.given.models if model != "gpt"]:
        steps = Compared(bench, model, (("lockstep", "captured"), ("lockstep", "ddp"), ("python", "captured"), ("python", "bare")))
        lines.append(f"| {model} | {steps.over('lockstep captured', 'lockstep ddp')} | "
                     f"{steps.over('python captured', 'python bare')} | "
                     f"{steps.over('lockstep captured', 'python captured')} | "
                     f"{steps.times('lockstep captured', 'lockstep ddp', 'python captured', 'python bare')} |")
    return "Captured step at one process, fp32", lines


def bus_bytes(collective, nbytes, ranks):
    """The bytes that each rank's link carries, as nccl-tests count them; with one rank, the buffer's own."""
    if ranks == 1:
        return nbytes
    return nbytes * {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1, "reduce": 1, "send_recv": 1}.get(collective, (ranks - 1) / ranks)


def collectives(bench):
    """Bus bandwidth of each collective and size, beside torch.distributed."""
    largest = 256 << 20 if bench.on_gpu else 1 << 20
    ranks = max(bench.given.ranks)
    lines = [f"| collective, {ranks} ranks | bytes | lockstep, GB/s | over ProcessGroupComm, GB/s | torch.distributed, GB/s | "
             "lockstep's time / torch.distributed's |", "|---|---|---|---|---|---|"]

    def timed(system, *words):
        seconds = {}
        for report in bench.run(system, ranks, ["collectives", "1024", str(largest), *words]):
            key = (report["collective"], report["bytes"])
            seconds[key] = max(seconds.get(key, 0), report["seconds"])
        return seconds

    samples = bench.rounds({"python": lambda: timed("python"), "lockstep": lambda: timed("lockstep"),
                            "process-group": lambda: timed("lockstep", "process-group")})
    for key in samples.get("lockstep", [{}])[0]:
        collective, nbytes = key

        def speed(system):
            if system not in samples:
                return "-"
            return f"{bus_bytes(collective, nbytes, ranks) / statistics.median(s[key] for s in samples[system]) / 1e9:.3f}"

        both = [a[key] / b[key] for a, b in zip(samples["lockstep"], samples.get("python", []))]
        compared = f"{statistics.median(both):.2f} ({min(both):.2f}-{max(both):.2f})" if both else ""
        lines.append(f"| {collective} | {nbytes:,} | {speed('lockstep')} | {speed('process-group')} | {speed('python')} | {compared} |")
    return "Collectives: bus bandwidth", lines


# ---- One step: backward above, all-reduces below -------------------------------------------------------------------


def spans_of(trace):
    """(compute, communication): spans (name, begin, end) in seconds of one profiled step's backward."""
    with open(trace) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]

    def span(event):
        return event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6

    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        moved = [event for event in kernels if "nccl" in event["name"].lower()]
        computed = [event for event in kernels if event not in moved]
        nodes = [span(event) for event in events if event["name"].startswith("autograd::engine::evaluate_function")]
        begin = min((node[1] for node in nodes), default=0)  # of the host: kernels of backward begin after it
        return [span(event) for event in computed if event["ts"] * 1e-6 >= begin], [span(event) for event in moved]
    computed = [span(event) for event in events if event["name"].startswith("autograd::engine::evaluate_function")]
    moved = [span(event) for event in events if re.search(r"(gloo|nccl)[:.]_?all_?reduce", event["name"])]
    return computed, moved


def union(spans):
    merged = []
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def exposed(computed, moved):
    """(communication, the part of it beside which nothing is computed), in seconds."""
    busy, total, hidden = union(computed), 0, 0
    for begin, end in union(moved):
        total += end - begin
        hidden += sum(max(0, min(end, b) - max(begin, a)) for a, b in busy)
    return total, total - hidden


def write_file_atomically(path, text):
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)
    print(f"wrote {path}")


def draw(path, title, systems):
    """An SVG with two lanes for each system: (name, computed, moved)."""
    width, left, lane, gap = 1000, 150, 26, 16
    length = max(max(end for _, _, end in c + m) - min(begin for _, begin, _ in c + m) for _, c, m in systems)
    height = 60 + len(systems) * (2 * lane + 3 * gap) + 40
    scale = (width - left - 20) / length
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
             f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
             f'<text x="10" y="24" font-size="15">{html.escape(title)}</text>']
    top = 46
    for name, computed, moved in systems:
        start = min(begin for _, begin, _ in computed + moved)
        parts.append(f'<text x="10" y="{top + 4}" font-weight="bold">{html.escape(name)}</text>')
        top += gap
        for label, spans, colour in (("backward", computed, "#3b6ea5"), ("all-reduce", moved, "#c8553d")):
            parts.append(f'<text x="10" y="{top + 18}">{label}</text>')
            for what, begin, end in spans:
                parts.append(f'<rect x="{left + (begin - start) * scale:.2f}" y="{top}" width="{max(0.4, (end - begin) * scale):.2f}" '
                             f'height="{lane - 4}" fill="{colour}" stroke="#ffffff" stroke-width="0.3">'
                             f'<title>{html.escape(what[:80])}: {1e3 * (end - begin):.3f} ms</title></rect>')
            top += lane
        top += 2 * gap - 4
    for i in range(6):
        x = left + i / 5 * length * scale
        parts.append(f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{top - 8}" stroke="#cccccc" stroke-width="0.5"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + 8}" text-anchor="middle">{1e3 * i / 5 * length:.2f}</text>')
    parts += [f'<text x="{(width + left) / 2}" y="{top + 26}" text-anchor="middle">ms since backward began</text>', "</svg>"]
    write_file_atomically(path, "\n".join(parts) + "\n")


def picture(bench):
    """Communication that backward does not hide, and the picture of one step of rank 0."""
    ranks, model = max(bench.given.ranks), "resnet50" if "resnet50" in bench.given.models else bench.given.models[0]
    lines = [f"| system, {model}, fp32, {ranks} ranks | communication, ms | exposed, ms | exposed part | buckets, MiB |", "|---|---|---|---|---|"]
    drawn = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, system in (("lockstep", "lockstep"), ("Python DDP", "python")):
            trace = os.path.join(scratch, system + ".json")
            found = bench.attempt(f"{name}, one step", lambda: bench.step_of(system, "ddp", model, "fp32", ranks, trace))
            if found is None:
                continue
            computed, moved = spans_of(trace)
            if moved and bench.on_gpu:
                total, open_part = exposed(computed, moved)
            else:  # a CPU's reports know it: the medians and the last step's times of the host
                total, open_part = found.get("communication", 0), found.get("exposed", 0)
            if computed and moved:
                drawn.append((name, computed, moved))
            buckets = ", ".join(f"{nbytes / 2**20:.2f}" for nbytes in found.get("bucket_bytes", []))
            lines.append(f"| {name} | {1e3 * total:.3f} | {1e3 * open_part:.3f} | {open_part / total if total else 0:.0%} | {buckets} |")
    if bench.given.picture and drawn:
        draw(bench.given.picture, f"One step of {model} on rank 0 of {ranks}, {'GPU' if bench.on_gpu else 'CPU'}", drawn)
    elif bench.given.picture:
        raise Skipped("the profile of the step has no all-reduce")
    return "Exposed communication", lines


# ---- The page ------------------------------------------------------------------------------------------------------


def versions(bench):
    said = [f"LibTorch {bench.config['torch']}", bench.config["cuda"], first_line([bench.config["compiler"], "--version"])]
    if bench.on_gpu:
        said.insert(0, first_line(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]) +
                    f" ({bench.gpus} GPU{'s' if bench.gpus > 1 else ''})")
    else:
        said.insert(0, f"no GPU, {len(os.sched_getaffinity(0))} cores")
    return "; ".join(part for part in said if part)


def write(path, bench, sections):
    lines = ["", f"Measured on {datetime.date.today()}: {versions(bench)}. {bench.given.rounds} rounds, each system in turn; a ratio is the",
             "median of the rounds, with the smallest and the largest in brackets; below 1 lockstep is faster. Repeat it with", "", "```sh",
             "cmake --workflow --preset bench-gpu", "```", "",
             record.comment("cmake --workflow --preset bench-gpu", "GPUs, time", page=True)]
    for title, table in sections:
        lines += ["", f"**{title}**", "", *table]
    if bench.skipped:
        lines += ["", "Not measured:", "", *(f"- {reason}" for reason in dict.fromkeys(bench.skipped))]
    if bench.given.picture and os.path.exists(bench.given.picture):
        lines += ["", f"![One step]({os.path.relpath(bench.given.picture, os.path.dirname(os.path.abspath(path)))})"]
    text = "\n".join([BEGIN, *lines, "", END])
    if os.path.exists(path):
        with open(path) as file:
            page = file.read()
        if page.count(BEGIN) != 1 or page.count(END) != 1:
            sys.exit(f"run.py: {path} has no single pair of the lines {BEGIN} and {END}: nothing was written there")
        text = page[:page.index(BEGIN)] + text + page[page.index(END) + len(END):]
    else:
        text += "\n"
    write_file_atomically(path, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of processes; default: 1 and the number of GPUs, with one GPU "
                        "also 2 that share it where NCCL is 2.30 or newer, on a CPU 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="timed steps of a program")
    parser.add_argument("--size", choices=("full", "small"))
    parser.add_argument("--models", nargs="+", choices=("convnet", "resnet50", "gpt"), default=["convnet", "resnet50", "gpt"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "tf32", "bf16", "fp16"))
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas; default: all")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one program")
    parser.add_argument("--write", help="the page whose tables are made anew")
    parser.add_argument("--picture", help="the SVG of one step")
    given = parser.parse_args()
    only = given.only.split(",")
    if unknown := set(only) - set(PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: give {','.join(PARTS)}")
    with open(given.config) as file:
        config = json.load(file)
    bench = Bench(config, given)
    given.ranks = given.ranks or bench.default_ranks()
    sections = []
    for part in PARTS:
        if part in only:
            section = bench.attempt(part, lambda: globals()[part](bench))
            if section and len(section[1]) > 2:
                sections.append(section)
                print("\n".join(["", section[0], *section[1], ""]), flush=True)
                if given.write:  # after each part: what is measured is kept whatever comes next
                    write(given.write, bench, sections)
    if not sections:
        sys.exit("run.py: nothing was measured")


if __name__ == "__main__":
    main()
