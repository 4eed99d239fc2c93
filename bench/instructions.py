"""Counts the instructions of a training step by whose code they are, with callgrind.

The program is run twice, with different numbers of steps, so that the difference over the steps is what one step
takes, without start and end. What a function executes itself counts for it, not what it calls.
"""
import collections
import re
import shutil
import socket
import subprocess
import tempfile

STEPS = {"linear": (5, 25), "convnet": (2, 8)}  # a step of the latter takes seconds here
OWNERS = {"lockstep": re.compile(r"\blockstep::"), "c10d and gloo": re.compile(r"\b(c10d|gloo)::")}


def self_costs(path):
    """Instructions by function, from a file of callgrind's."""
    names, costs, function, skip = {}, collections.Counter(), None, False
    with open(path) as file:
        for line in file:
            if line.startswith("fn="):
                number, _, name = line[3:].strip().partition(" ")
                function = names.setdefault(number, name)
            elif line.startswith("cfn="):
                number, _, name = line[4:].strip().partition(" ")
                names.setdefault(number, name)
            elif line.startswith("calls="):
                skip = True  # the line after it is the cost of what was called
            elif line[:1].isdigit() or line[:1] in "+-*":
                if not skip:
                    costs[function] += int(line.split()[1])
                skip = False
    return costs


def by_owner(costs):
    totals = collections.Counter(all=sum(costs.values()))
    for function, cost in costs.items():
        # A template of LibTorch's or of the standard library's over types of lockstep is what lockstep makes of it.
        for owner, pattern in OWNERS.items():
            if pattern.search(function):
                totals[owner] += cost
                break
    return totals


def of_ranks(program, ranks, words, environment):
    """By owner, of the rank with the most instructions of lockstep's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        # One by one: a program that starts itself again starts valgrind instead.
        started = []
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            started.append(subprocess.Popen(
                ["valgrind", "--tool=callgrind", f"--callgrind-out-file={scratch}/{rank}", program, *words],
                env={**environment, **{name: str(value) for name, value in place.items()}}, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True))
        outputs = [process.communicate()[0] for process in started]
        for process, output in zip(started, outputs):
            if process.returncode != 0:
                raise RuntimeError(f"callgrind ended with {process.returncode}:\n{output[-2000:]}")
        totals = [by_owner(self_costs(f"{scratch}/{rank}")) for rank in range(ranks)]
    return max(totals, key=lambda total: total["lockstep"])


def a_step(program, ranks, what, environment):
    """Instructions of one step by owner, or None where there is no callgrind."""
    if shutil.which("valgrind") is None:
        return None
    counts = STEPS[what]
    few, many = (of_ranks(program, ranks, [what, str(steps), "3"], environment) for steps in counts)
    return {owner: (many[owner] - few[owner]) / (counts[1] - counts[0]) for owner in (*OWNERS, "all")}
