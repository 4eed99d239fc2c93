"""Runs the same training in lockstep, in Python DDP and on c10d::Reducer, in turn, and prints a line a figure.

run.py CONFIG [--rounds 7] [--write docs/benchmarks.md] [--only convnet,linear,epoch,parts,instructions]

CONFIG is written by CMake (bench/CMakeLists.txt). Each round runs every program once, A B C A B C ..., so that what
else the machine does meets all of them; a ratio is taken within a round, and the line gives the median of the rounds
and, in brackets, the smallest and the largest.
"""
import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
import instructions
import record
from command import first_line, mpirun

RANKS = 2
# What lockstep sets out to reach.
GOALS = {"convnet-step": 0.75, "linear-step": 0.12, "start": 0.06, "epoch": 0.6, "memory": 0.3, "optimizer-10": 1.0, "optimizer-300": 1.0,
         "sampler-set-epoch": 1.2, "sampler-memory": 1.0}


def run(command, environment):
    """What each rank reported, by rank; first_step_at becomes seconds since the start of the process."""
    # Python's launchers abort at their exit now and then, which costs this one sample and not the whole table.
    for attempt in range(3 if "python" in os.path.basename(command[0]) else 1):
        begin = time.monotonic()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # Under torchrun the lines of two ranks may run into each other.
        reports = [json.loads(found) for found in re.findall(r"BENCH (\{.*?\})", done.stdout)]
        if done.returncode == 0 and len(reports) == RANKS:
            break
        print(f"run {attempt + 1} failed ({done.returncode}): {' '.join(command)}", flush=True)
    else:
        sys.exit(f"FAILED ({done.returncode}): {' '.join(command)}\n{done.stdout}{done.stderr}")
    for report in reports:
        if "first_step_at" in report:
            report["start"] = report.pop("first_step_at") - begin
    return reports


class Table:
    """Samples by figure and system, in rounds; prints and keeps the ratios."""

    def __init__(self):
        self.samples, self.rows = {}, []
        self.instructions = {}  # of a step, by training and by whose code they are
        self.parts = []  # ratios that a program has measured by itself: figure, pair, median and spread
        self.remarks = []

    def add(self, figure, system, value):
        self.samples.setdefault(figure, {}).setdefault(system, []).append(value)

    def ratio(self, figure, system, other, unit, scale=1.0):
        mine, theirs = self.samples.get(figure, {}).get(system), self.samples.get(figure, {}).get(other)
        if not mine or not theirs:
            return
        ratios = [a / b for a, b in zip(mine, theirs)]
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"RATIO {figure} {system}/{other} {middle:.2f} ({low:.2f}-{high:.2f})", flush=True)
        of_others = {"reducer": 1.0, "lockstep-gloo": 1.0, "lockstep-mpi": None, "python-workers0": None, "python-shm": None,
                     "uncoupled": {"linear-step": 1.4, "convnet-step": 1.05}.get(figure)}
        goal = of_others.get(other, GOALS.get(figure))
        self.rows.append((figure, f"{system}/{other}", middle, low, high, statistics.median(mine) * scale,
                          statistics.median(theirs) * scale, unit, goal))


def systems(config, environment, arguments):
    """Each system's command for one measured training."""
    found = {
        "lockstep": [config["lockstep"], "--nproc", str(RANKS), *arguments],
        "lockstep-gloo": [config["lockstep"], "--nproc", str(RANKS), "gloo", *arguments],
        "uncoupled": [config["lockstep"], "--nproc", str(RANKS), "uncoupled", *arguments],
        "reducer": [config["reducer"], "--nproc", str(RANKS), *arguments],
    }
    if config["lockstep_mpi"] and mpirun(RANKS):
        found["lockstep-mpi"] = [*mpirun(RANKS), config["lockstep_mpi"], "mpi", *arguments]
    if config["python"]:
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python_ddp.py")
        torchrun = [config["python"], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), script]
        found["torchrun"] = [*torchrun, *arguments]
        if config["python_backend"]:
            found["python-shm"] = [*torchrun, "lockstep", config["python_backend"], *arguments]
        found["spawn"] = [config["python"], script, "--spawn", str(RANKS), *arguments]
    return found


def train_steps(table, config, environment, rounds, what, steps, warmup):
    bits = {}
    for _ in range(rounds):
        for system, command in systems(config, environment, [what, str(steps), str(warmup)]).items():
            reports = run(command, environment)
            bits[system] = {report["rank"]: report.get("bits") for report in reports}
            step = max(report["step"] for report in reports)
            start = max(report["start"] for report in reports)
            peak = max(report["peak_kib"] for report in reports)
            table.add(f"{what}-step", {"torchrun": "python"}.get(system, system), step)
            if what == "convnet":
                table.add("start", system, start)
                table.add("memory", {"torchrun": "python"}.get(system, system), peak)
    if "python-shm" in bits and bits["python-shm"] != bits["torchrun"]:
        sys.exit(f"FAILED: {what} in Python has other bits over lockstep's backend than over Gloo")
    for other in ("uncoupled", "python", "python-shm", "reducer", "lockstep-gloo", "lockstep-mpi"):
        table.ratio(f"{what}-step", "lockstep", other, "ms", 1e3)
    if what == "convnet":
        table.ratio("start", "lockstep", "torchrun", "s")
        table.ratio("start", "lockstep", "spawn", "s")
        table.ratio("memory", "lockstep", "python", "MiB", 1 / 1024)


def train_overlap(table, config, environment, rounds):
    for _ in range(rounds):
        reports = run(systems(config, environment, ["overlap", "100", "20"])["lockstep"], environment)
        worst = max(reports, key=lambda report: report["exposed"] / report["communication"])
        table.add("exposed", "lockstep", worst["exposed"])
        table.add("exposed", "communication", worst["communication"])
    table.ratio("exposed", "lockstep", "communication", "ms", 1e3)


def train_epoch(table, config, environment, rounds, folder):
    for _ in range(rounds):
        table.add("epoch", "lockstep", max(
            report["epoch"] for report in run(systems(config, environment, ["epoch", folder])["lockstep"], environment)))
        if config["python"]:
            # 4 workers are the tutorial's; on few cores none at all may be faster, so that is measured too.
            for system, workers in (("python", "4"), ("python-workers0", "0")):
                command = systems(config, environment, ["epoch", folder, workers])["torchrun"]
                table.add("epoch", system, max(report["epoch"] for report in run(command, environment)))
    table.ratio("epoch", "lockstep", "python", "s")
    table.ratio("epoch", "lockstep", "python-workers0", "s")


def measure_parts(table, config):
    """Optimizers and samplers, each beside LibTorch's in one process."""
    for program in ("optimizers", "samplers"):
        done = subprocess.run([config[program]], stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout, end="", flush=True)
        for line in done.stdout.splitlines():
            ratio = re.fullmatch(r"RATIO (\S+) (\S+) (\S+) (\(\S+\))", line)
            if ratio:
                table.parts.append(ratio.groups())
            elif "made in" in line:
                table.remarks.append(line)


def count_instructions(table, config, environment):
    for what in ("linear", "convnet"):
        found = instructions.a_step(config["lockstep"], RANKS, what, environment)
        if found is None:
            print("SKIPPED the instructions of a step: no valgrind")
            return
        table.instructions[what] = found
        print(f"INSTRUCTIONS {what}-step " + ", ".join(f"{owner} {count:,.0f}" for owner, count in found.items()),
              flush=True)


def digits_folder(config):
    """8,000 real digits where there are some, else as many drawn ones."""
    real = os.path.join(config["shared"], "data", "mnist") if config["shared"] else ""
    if real and os.path.isdir(real):
        return real, "8,000 real digits"
    folder = os.path.join(config["build"], "digits")
    subprocess.run([config["lockstep"], "draw", folder], check=True)
    return folder, "8,000 drawn digits (no real ones: LOCKSTEP_SHARED)"


def machine():
    model = "unknown processor"
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    with open("/proc/meminfo") as info:
        memory = int(info.readline().split()[1]) // 1024 // 1024
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory} GiB"


def write(path, table, config, rounds, digits):
    torch_version = "no Python package of torch: its figures are left out"
    if config["python"]:
        torch_version = first_line([config["python"], "-c", "import torch, sys; print(f'LibTorch and torch "
                                    "{torch.__version__}, Python {sys.version.split()[0]}')"])
    lines = [
        "# Benchmarks", "",
        f"The same training in lockstep, in Python's DistributedDataParallel and in C++ on `c10d::Reducer` (Python's own engine): {RANKS} ranks on",
        "one machine, one thread each: lockstep in shared memory (CpuComm) and over Gloo, the others over Gloo (python-shm: over lockstep's",
        "backend), and two loops that do not communicate (uncoupled). A ratio below 1 is in lockstep's favour: the median of the rounds, with the",
        "smallest and the largest in brackets. Repeat it with", "",
        "```sh", "cmake --workflow --preset bench", "```", "",
        record.comment("cmake --workflow --preset bench", "time, CPU", page=True), "",
        "| figure | ratio | median (spread) | goal | lockstep | other | unit |", "|---|---|---|---|---|---|---|",
    ]
    for figure, pair, middle, low, high, mine, theirs, unit, goal in table.rows:
        lines.append(f"| {figure} | {pair} | {middle:.2f} ({low:.2f}-{high:.2f}) | {goal if goal else ''} | "
                     f"{mine:.4g} | {theirs:.4g} | {unit} |")
    if table.parts:
        lines += ["", "Optimizers (the mean over SGD, SGD with momentum, Adam and AdamW, 10 and 300 parameters) and the sampler (10^8 samples), "
                  "beside LibTorch's:", "",
                  "| figure | ratio | median (spread) | goal |", "|---|---|---|---|"]
        for figure, pair, middle, spread in table.parts:
            lines.append(f"| {figure} | {pair} | {middle} {spread} | {GOALS.get(figure, '')} |")
        lines += [""] + [f"DistributedSampler: {remark}." for remark in table.remarks]
    if table.instructions:
        lines += ["", "Instructions of one step of a rank (callgrind):", "",
                  "| training | lockstep's own | c10d's and Gloo's | all | lockstep's share |", "|---|---|---|---|---|"]
        for what, found in table.instructions.items():
            lines.append(f"| {what} | {found['lockstep']:,.0f} | {found['c10d and gloo']:,.0f} | {found['all']:,.0f} | "
                         f"{100 * found['lockstep'] / found['all']:.2f} % |")
    missed = [f"{figure} {pair} ({middle:.2f} instead of {goal})" for figure, pair, middle, _, _, _, _, _, goal in table.rows
              if goal and middle > goal]
    missed += [f"{figure} {pair} ({middle} instead of {GOALS[figure]})" for figure, pair, middle, _ in table.parts
               if figure in GOALS and float(middle) > GOALS[figure]]
    lines += ["", f"Missed: {', '.join(missed)}." if missed else "No goal was missed."]
    lines += [
        "", f"Measured on {datetime.date.today()}: {machine()}; {first_line([config['compiler'], '--version'])}; flags",
        f"`{config['flags']}`; {torch_version}; {rounds} rounds.", "",
        "- convnet-step, linear-step: the median step of the slower rank. The 29,034-parameter network of the MNIST example, and `Linear(20, 1)`;",
        "  batches of 32; SGD.",
        "- python-shm: Python's DDP over lockstep's shared memory (bench/python_backend.cpp), with the bits of Python's DDP over Gloo.",
        "  Its all-reduce blocks, which costs no overlap here: both models have one bucket.",
        "- start: from the start of the process to the end of the slower rank's first step, ConvNet.",
        f"- epoch: the second of two epochs over {digits}, loading included. Python loads with 4 workers, workers0 without any.",
        "- memory: the peak resident memory of the larger rank, ConvNet.",
        "- exposed: the communication time that backward does not hide, by `ddp.report()`; ConvNet in buckets of 32 KiB.", "",
    ]
    others = "\n## The control plane\n"  # what follows is of other programs
    with open(path) as file:
        kept = file.read().partition(others)
    lines[-1] += "".join(kept[1:])
    with open(path + ".part", "w") as file:
        file.write("\n".join(lines))
    os.replace(path + ".part", path)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write")
    parser.add_argument("--only", default="convnet,linear,epoch,parts,instructions")
    given = parser.parse_args()
    with open(given.config) as file:
        config = json.load(file)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    only, table, digits = given.only.split(","), Table(), "no digits"
    if not config["python"]:
        print("SKIPPED the figures beside Python: no Python with the torch package (set LOCKSTEP_PYTHON)")
    elif not config["python_backend"]:
        print("SKIPPED Python's DDP over lockstep's backend: no Python.h, libtorch_python.so or pybind11")
    if "convnet" in only:
        train_steps(table, config, environment, given.rounds, "convnet", 100, 20)
        train_overlap(table, config, environment, given.rounds)
    if "linear" in only:
        train_steps(table, config, environment, given.rounds, "linear", 500, 100)
    if "epoch" in only:
        folder, digits = digits_folder(config)
        train_epoch(table, config, environment, given.rounds, folder)
    if "parts" in only:
        measure_parts(table, config)
    if given.write:  # and once more with the instructions, which take the longest
        write(given.write, table, config, given.rounds, digits)
    if "instructions" in only:
        count_instructions(table, config, environment)
        if given.write and table.instructions:
            write(given.write, table, config, given.rounds, digits)


if __name__ == "__main__":
    main()
