"""Measures all-reduces in shared memory beside Gloo and OpenMPI, and what the machine itself does, in one run.

collectives.py CONFIG [--ranks 2 4 8] [--rounds 3] [--largest BYTES] [--write docs/benchmarks.md]

CONFIG is written by CMake (bench/CMakeLists.txt). Each round runs every program once, A B C A B C ..., so that what else the
machine does meets all of them. The page gets the tables between its lines "<!-- collectives: begin -->" and
"<!-- collectives: end -->".
"""
import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
import record
from command import mpirun, write_section
from run import machine


def run(command):
    """Seconds by (system, bytes)."""
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"FAILED ({done.returncode}): {' '.join(command)}\n{done.stdout}{done.stderr}")
    reports = [json.loads(found) for found in re.findall(r"BENCH (\{.*?\})", done.stdout)]
    return {(report["system"], report["bytes"]): report["seconds"] for report in reports}


def measure(config, ranks, rounds, largest):
    commands = [[config["collectives"], "machine"]]
    commands += [[config["collectives"], "--nproc", str(ranks), system, "4", str(largest)] for system in ("shm", "gloo")]
    if config["mpi_all_reduce"] and mpirun(ranks):
        commands.append([*mpirun(ranks), config["mpi_all_reduce"], "4", str(largest)])
    else:
        print("SKIPPED OpenMPI: no mpirun, or no MPI to compile with")
    samples = {}
    for _ in range(rounds):
        for command in commands:
            for key, seconds in run(command).items():
                samples.setdefault(key, []).append(seconds)
            print(".", end="", flush=True)
    print()
    return samples


def table(samples, ranks):
    def time(system, size):
        found = samples.get((system, size))
        return f"{1e6 * statistics.median(found):,.2f}" if found else "-"

    def ratio(system, size):
        found = samples.get((system, size))
        if not found:
            return "-"
        ratios = [mine / other for mine, other in zip(samples[("shm", size)], found)]
        return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"

    lines = [f"**{ranks} ranks**: a ping takes {time('ping over a flag', 0)} us over a flag and {time('ping over a futex', 0)} us over a futex.", "",
             "| bytes | shared memory, us | Gloo, us | OpenMPI, us | memcpy, us | shared memory / Gloo | shared memory / OpenMPI |",
             "|---|---|---|---|---|---|---|"]
    for size in sorted(size for system, size in samples if system == "shm"):
        lines.append(f"| {size:,} | {time('shm', size)} | {time('gloo', size)} | {time('mpi', size)} | {time('memcpy', size)} | "
                     f"{ratio('gloo', size)} | {ratio('mpi', size)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=64 << 20)
    parser.add_argument("--write")
    given = parser.parse_args()
    with open(given.config) as file:
        config = json.load(file)
    lines = [f"All-reduces of floats, one by one. Measured on {datetime.date.today()}: {machine()}; {given.rounds} rounds.", "",
             record.comment("python3 bench/collectives.py build/bench/bench/config.json", "time, CPU", page=True)]
    for ranks in given.ranks:
        found = table(measure(config, ranks, given.rounds, given.largest), ranks)
        print("\n".join(found), flush=True)
        lines += ["", *found]
    if given.write:
        write_section(given.write, "collectives", lines)


if __name__ == "__main__":
    main()
