"""Measures what a run costs with many ranks, and what DistributedDataParallel adds for each of many parameters.

scale.py CONFIG [--ranks 1 2 4 8 16 32] [--write docs/benchmarks.md]

CONFIG is written by CMake (bench/CMakeLists.txt). The page gets the tables between its lines "<!-- scale: begin -->" and
"<!-- scale: end -->".
"""
import argparse
import datetime
import json
import os
import re
import resource
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
import record
from command import write_section
from run import machine


def run(config, ranks, *arguments):
    """What the ranks report, the wall and the CPU seconds of the run, and the time at which it began."""
    command = [config["lockstep"], "--nproc", str(ranks), *arguments]
    used, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"FAILED ({done.returncode}): {' '.join(command)}\n{done.stdout}{done.stderr}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return [json.loads(found) for found in re.findall(r"BENCH (\{.*?\})", done.stdout)], cpu, begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--write")
    given = parser.parse_args()
    with open(given.config) as file:
        config = json.load(file)
    lines = [f"Measured on {datetime.date.today()}: {machine()}. The start ends with the first step of the slowest rank; the CPU "
             "time is that of a whole run of one step, per process.", "",
             record.comment("python3 bench/scale.py build/bench/bench/config.json", "time, CPU", page=True), "",
             "| ranks | start, s | CPU time of a process, s | step of `Linear(20, 1)`, us | most memory of a rank, MiB |", "|---|---|---|---|---|"]
    for ranks in given.ranks:
        reports, cpu, begin = run(config, ranks, "linear", "1", "0")
        start = max(report["first_step_at"] for report in reports) - begin
        steps, _, _ = run(config, ranks, "linear", "300", "50")
        lines.append(f"| {ranks} | {start:.2f} | {cpu / (ranks + (ranks > 1)):.2f} | {max(report['step'] for report in steps) * 1e6:,.0f} | "
                     f"{max(report['peak_kib'] for report in steps) / 1024:,.0f} |")
        print(lines[-1], flush=True)
    lines += ["", "What DistributedDataParallel adds to the step of the bare loop, per small parameter (the median of 60 steps; below 0 where a "
              "gradient is freed while its memory is still in the cache):", "",
              "| parameters | bare loop, us | added at one rank, us | added at two ranks, us |", "|---|---|---|---|"]
    one, two = (run(config, ranks, "parameters", "60", "10")[0] for ranks in (1, 2))
    for report in one:
        slower = max((other for other in two if other["parameters"] == report["parameters"]), key=lambda other: other["added"])
        lines.append(f"| {report['parameters']:,} | {report['bare'] * 1e6:.2f} | {report['added'] * 1e6:.2f} | {slower['added'] * 1e6:.2f} |")
        print(lines[-1], flush=True)
    if given.write:
        write_section(given.write, "scale", lines)


if __name__ == "__main__":
    main()
