"""Measures how soon a run has ended after a rank was killed.

failure.py PROGRAM [ARGUMENT...] [--ranks 3] [--times 20]

Starts PROGRAM with --nproc, waits until its ranks compute, kills one of them by SIGKILL, each time another one, and prints
after which time the last survivor had ended and after which time the launcher had, which reports the failure: the
median and the largest.
"""
import argparse
import os
import signal
import statistics
import subprocess
import sys
import time


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def runs(pid):
    """Whether the process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def one_run(command, ranks, victim):
    """Seconds from the kill to the end of the last survivor, and to that of the launcher."""
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    begin = time.monotonic()
    while len(children(launcher.pid)) < ranks or min(map(cpu_seconds, children(launcher.pid))) < 1.5:
        if launcher.poll() is not None or time.monotonic() > begin + 120:
            launcher.kill()
            sys.exit(f"{' '.join(command)} does not compute: {launcher.communicate()[1]}")
        time.sleep(0.02)
    pids = children(launcher.pid)
    survivors = [pid for pid in pids if pid != pids[victim]]
    killed = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    while any(map(runs, survivors)):
        time.sleep(0.001)
    last = time.monotonic() - killed
    said = launcher.communicate()[1]
    if launcher.returncode != 137 or f"rank {victim}" not in said:
        sys.exit(f"exit code {launcher.returncode}, and: {said}")
    return last, time.monotonic() - killed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", nargs="+")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args()
    command = [given.program[0], "--nproc", str(given.ranks), *given.program[1:]]
    times = [one_run(command, given.ranks, number % given.ranks) for number in range(given.times)]
    for what, column in zip(("the last survivor", "the launcher"), zip(*times)):
        print(f"{given.ranks} ranks, {given.times} kills: {what} has ended after "
              f"{statistics.median(column) * 1e3:.0f} ms (median), {max(column) * 1e3:.0f} ms (at most)")


if __name__ == "__main__":
    main()
