"""Measures what a user's file costs to compile beside a bare LibTorch loop: user CPU time and peak memory, at -O2.

compile.py CONFIG [--rounds 3] [--compilers g++ clang++] [--write docs/benchmarks.md]

CONFIG is written by CMake (bench/CMakeLists.txt). Each round compiles every file once, A B C A B C ...; a ratio is taken within a
round. The page gets the table between its lines "<!-- compile: begin -->" and "<!-- compile: end -->".
"""
import argparse
import datetime
import json
import os
import re
import shutil
import statistics
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
import record
from command import first_line, write_section
from run import machine

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
BARE, README, BY_HAND = "bare loop", "README's program", "loop by hand"
HEADER_ONLY, COMPILED, PRECOMPILED = "header-only", "compiled", "compiled, precompiled header"
# Of the README's program, by mode and compiler.
GOALS = {(HEADER_ONLY, "g++"): 2.5, (HEADER_ONLY, "clang++"): 2.5, (COMPILED, "g++"): 1.5, (COMPILED, "clang++"): 1.5,
         (PRECOMPILED, "clang++"): 2.0}


def usage_of(command):
    """The user CPU seconds and the peak memory in MiB of a command. A compiler driver waits for the compiler itself, so that these are
    of both together."""
    _, status, usage = os.wait4(os.spawnvp(os.P_NOWAIT, command[0], command), 0)
    if status != 0:
        sys.exit(f"FAILED: {' '.join(command)}")
    return usage.ru_utime, usage.ru_maxrss / 1024


def sources(scratch):
    with open(f"{ROOT}/README.md") as file:
        program = re.search(r"^```cpp\n(.*?)^```$", file.read(), re.DOTALL | re.MULTILINE).group(1)
    with open(f"{scratch}/readme.cpp", "w") as file:
        file.write(program)
    return {BARE: f"{ROOT}/bench/bare_loop.cpp", README: f"{scratch}/readme.cpp", BY_HAND: f"{ROOT}/examples/five_lines.cpp"}


def precompile(compiler, options, name, includes, scratch):
    """Precompiles a header with these includes. Returns the options that use it."""
    header = f"{scratch}/{name}.hpp"
    with open(header, "w") as file:
        file.writelines(f"#include <{include}>\n" for include in includes)
    if "clang" in compiler:
        usage_of([compiler, *options, "-x", "c++-header", header, "-o", f"{header}.pch", "-fpch-instantiate-templates"])
        return ["-include-pch", f"{header}.pch"]
    usage_of([compiler, *options, "-x", "c++-header", header, "-o", f"{header}.gch"])
    return ["-include", header, "-Werror=invalid-pch"]


def measure(config, compiler, rounds):
    """Samples by program and mode."""
    # A folder of the compiler's own, given again, would be searched before its place.
    includes = [part for folder in config["includes"].split("|") if folder and folder != "/usr/include" for part in ("-isystem", folder)]
    options = ["-std=c++20", "-O2", *[f"-D{name}" for name in config["definitions"].split("|") if name], *includes]
    compiled, samples = [*options, "-DLOCKSTEP_COMPILED"], {}
    with tempfile.TemporaryDirectory() as scratch:
        bare = precompile(compiler, options, "torch", ["torch/torch.h"], scratch)
        both = precompile(compiler, compiled, "lockstep", ["torch/torch.h", "lockstep/lockstep.hpp"], scratch)
        modes = {(BARE, HEADER_ONLY): options, (BARE, PRECOMPILED): [*options, *bare]}
        for program in (README, BY_HAND):
            modes |= {(program, HEADER_ONLY): options, (program, COMPILED): compiled, (program, PRECOMPILED): [*compiled, *both]}
        files = sources(scratch)
        for _ in range(rounds):
            for (program, mode), given in modes.items():
                usage = usage_of([compiler, *given, "-c", files[program], "-o", f"{scratch}/object.o"])
                samples.setdefault((program, mode), []).append(usage)
                print(".", end="", flush=True)
    print()
    samples[(BARE, COMPILED)] = samples[(BARE, HEADER_ONLY)]  # it has nothing that is compiled elsewhere
    return samples


def rows(samples, compiler):
    """The rows of a compiler, and which goals were missed."""
    def ratio(mine, bare, which):
        ratios = [a[which] / b[which] for a, b in zip(mine, bare)]
        return statistics.median(ratios), f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

    lines, missed = [], []
    for mode in (HEADER_ONLY, COMPILED, PRECOMPILED):
        for program in (BARE, README, BY_HAND):
            if (program, mode) == (BARE, COMPILED):
                continue
            mine, bare = samples[(program, mode)], samples[(BARE, mode)]
            goal = GOALS.get((mode, compiler)) if program == README else None
            (middle, time), (_, memory) = (ratio(mine, bare, which) if program != BARE else (1, "") for which in (0, 1))
            if goal and middle > goal:
                missed.append(f"{compiler}, {mode} ({middle:.2f} instead of {goal})")
            seconds, mebibytes = (statistics.median(usage[which] for usage in mine) for which in (0, 1))
            lines.append(f"| {compiler} | {mode} | {program} | {seconds:.1f} | {time} | {goal or ''} | {mebibytes:,.0f} | {memory} |")
    return lines, missed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compilers", nargs="+", default=["g++", "clang++"])
    parser.add_argument("--write")
    given = parser.parse_args()
    with open(given.config) as file:
        config = json.load(file)
    table, missed, versions = [], [], []
    for compiler in given.compilers:
        if not shutil.which(compiler):
            print(f"SKIPPED {compiler}: there is no such compiler")
            continue
        lines, over = rows(measure(config, compiler, given.rounds), compiler)
        print("\n".join(lines), flush=True)
        table, missed = table + lines, missed + over
        versions.append(first_line([compiler, "--version"]))
    lines = [f"Measured on {datetime.date.today()}: {machine()}; {'; '.join(versions)}; {given.rounds} rounds.", "",
             record.comment("python3 bench/compile.py build/bench/bench/config.json", "time, CPU", page=True), "",
             "| compiler | mode | program | user CPU time, s | / bare loop | goal | peak memory, MiB | / bare loop |",
             "|---|---|---|---|---|---|---|---|", *table, "", f"Missed: {'; '.join(missed)}." if missed else "No goal was missed."]
    if given.write and table:
        write_section(given.write, "compile", lines)


if __name__ == "__main__":
    main()
