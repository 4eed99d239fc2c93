#!/usr/bin/env python3
"""The commands and commits of what the pages show as printed or measured.

usage: tools/record.py check            fails where an output or a table of measurements has no record
       tools/record.py stamp PAGE:LINE COMMAND [--depends A,B]   writes the record of the block that follows that line
       tools/record.py stale THING...   fails where a record that depends on a THING is older than include/ and cmake/
       tools/record.py run FOLDER       runs what depends on nothing with the programs in FOLDER, and compares
       tools/record.py output PROGRAM SCRATCH EXPECTED ARGUMENTS ...   runs a page's program once for each pair, and compares

A block fenced without a language, and a table of which half the rows have a decimal number, is a record. The line before it is

    <!-- record: COMMAND @ COMMIT; depends: threads, CPU -->       or, for all tables of a page, <!-- record page: ... -->
    <!-- output: ARGUMENTS -->                                     compared by the test of the program before it

`transcript` stands for the lines of the block that begin with "$ ". "...", alone on a line, stands for any lines.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md", "tests/parity.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
RECORD = re.compile(r" *<!-- record(?P<page> page)?: (?P<command>.+) @ (?P<commit>[0-9a-f]{7,40})(; depends: (?P<depends>.+))? -->$")


def git(*words):
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


def comment(command, depends="", page=False):
    """The record of a block that is made now. Changes that are in no commit give 0000000, which `check` refuses."""
    clean = git("diff", "--quiet", "HEAD", "--", "include", "cmake").returncode == 0
    commit = git("rev-parse", "--short", "HEAD").stdout.strip() if clean else "0000000"
    return f"<!-- record{' page' if page else ''}: {command} @ {commit}{'; depends: ' + depends if depends else ''} -->"


def measured(rows):
    body = [re.sub(r"`[^`]*`", "", row) for row in rows[2:]]
    return 2 * sum(bool(re.search(r"\d\.\d", row)) for row in body) >= len(body) > 0


def blocks(page):
    """Line number, lines, and the record, the text `output` or None of each recorded block of a page, and all records."""
    lines = (ROOT / page).read_text().split("\n")
    whole = next((m for m in map(RECORD.match, lines) if m and m["page"]), None)
    found, at = [], 0
    while at < len(lines):
        fence, end = lines[at].strip(), at + 1
        if fence.startswith("```"):
            while lines[end].strip() != "```":
                end += 1
            recorded, text = fence == "```", textwrap.dedent("\n".join(lines[at + 1 : end])).split("\n")
            end += 1
        elif fence.startswith("|"):
            while end < len(lines) and lines[end].strip().startswith("|"):
                end += 1
            recorded, text = measured(lines[at:end]), lines[at:end]
        else:
            recorded = False
        if recorded:
            before = next((line for line in reversed(lines[:at]) if line), "")
            record = RECORD.match(before) or (fence.startswith("|") and whole) or None
            found.append((at + 1, text, "output" if before.startswith("<!-- output:") else record))
        at = end
    return found


def records():
    for page in PAGES:
        for line, text, record in blocks(page):
            yield f"{page}:{line}", text, record


def check():
    faults, count = [], 0
    for place, _, record in records():
        count += 1
        if record is None:
            faults.append(f"{place}: no record of its command and commit before it (an example is fenced as ```text)")
        elif record != "output" and git("rev-parse", "--git-dir").returncode == 0:
            shallow = git("rev-parse", "--is-shallow-repository").stdout.strip() == "true"
            if not shallow and git("cat-file", "-e", f"{record['commit']}^{{commit}}").returncode != 0:
                faults.append(f"{place}: {record['commit']} is no commit: commit include/ and cmake/, and repeat the command")
    print("\n".join(faults) or f"{count} outputs and tables have their command and commit")
    return bool(faults)


def stale(things):
    last = git("log", "-1", "--format=%h", "--", "include", "cmake").stdout.strip()
    if not last or git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        print("SKIPPED: the history of the repository is not here")
        return 77
    faults = set()
    for place, _, record in records():
        if record in (None, "output") or not set(things) & set(re.split(", *", record["depends"] or "")):
            continue
        if git("merge-base", "--is-ancestor", last, record["commit"]).returncode != 0:
            faults.add(f"{place}: made at {record['commit']}, older than {last}: repeat {record['command']}")
    print("\n".join(sorted(faults)) or f"no record of {', '.join(things)} is older than {last}")
    return bool(faults)


def close(printed, shown):
    """Equal but for numbers with a decimal point, which have as many decimals and differ by 1 % and two in the last place at most:
    their last digits depend on the processor."""
    decimal = r"[0-9]+\.[0-9]+"
    if re.sub(decimal, "#", printed) != re.sub(decimal, "#", shown):
        return False
    for a, b in zip(re.findall(decimal, printed), re.findall(decimal, shown)):
        if len(a.split(".")[1]) != len(b.split(".")[1]):
            return False
        a, b = int(a.replace(".", "")), int(b.replace(".", ""))
        if 100 * abs(a - b) > b + 200:
            return False
    return True


def same(printed, shown):
    """Whether each line shown was printed, in any order since ranks print in any, and no other where none is left out."""
    left = list(printed)
    for line in shown:
        if line != "...":
            match = next((other for other in left if close(other, line)), None)
            if match is None:
                print(f"not printed: {line}")
                return False
            left.remove(match)
    return "..." in shown or not left


def execute(command, folder, **more):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, **more)
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if not re.match(r"lockstep: \d+ ranks? on 1 host ", line)], done.returncode


def run(programs):
    faults, count = 0, 0
    for place, text, record in records():
        if record in (None, "output") or record["command"] != "transcript" or record["depends"]:
            continue
        commands = [i for i, line in enumerate(text) if line.startswith("$ ")] + [len(text)]
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        with tempfile.TemporaryDirectory() as folder:
            for begin, end in zip(commands, commands[1:]):
                printed, _ = execute(["sh", "-c", text[begin][2:]], folder, env=environment)
                count += 1
                if not same(printed, text[begin + 1 : end]):
                    faults += 1
                    print(f"{place} does not show what '{text[begin][2:]}' prints:\n" + "\n".join(printed))
    print(f"{count} commands of the pages were run, of which {faults} print something else")
    return faults > 0 or count == 0


def output(program, scratch, runs):
    """One folder for all runs: a later one finds the files of those before it."""
    subprocess.run(["rm", "-rf", scratch], check=True)
    os.makedirs(scratch)
    for expected, arguments in zip(runs[::2], runs[1::2]):
        printed, code = execute([program, *shlex.split(arguments)], scratch)
        print("\n".join(printed))
        if code != 0 or not same(printed, pathlib.Path(expected).read_text().splitlines()):
            print(f"ended with {code}, and {expected} holds what the page shows")
            return True
    return False


def stamp(place, command, depends=""):
    page, line = place.split(":")
    path, number = ROOT / page, int(line)
    lines = path.read_text().split("\n")
    if RECORD.match(lines[number - 1]):
        del lines[number - 1]
        number -= 1
    lines.insert(number, comment(command, depends))
    path.write_text("\n".join(lines))
    return False


def main(words):
    depends = words.pop(words.index("--depends") + 1) if "--depends" in words else ""
    words = [word for word in words if word != "--depends"]
    actions = {"check": check, "stamp": lambda place, command: stamp(place, command, depends), "stale": lambda *t: stale(t),
               "run": run, "output": lambda program, scratch, *runs: output(program, scratch, runs)}  # fmt: skip
    if not words or words[0] not in actions:
        sys.exit(__doc__)
    return int(actions[words[0]](*words[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
