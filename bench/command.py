import os
import shutil
import subprocess
import sys


def first_line(command):
    """The first line of a command's standard output; empty if the command cannot be run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    return done.stdout.split("\n")[0]


def mpirun(ranks):
    """The beginning of a command that Open MPI runs on so many ranks of this machine; empty where there is no mpirun."""
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)] if shutil.which("mpirun") else []


def write_section(page, name, lines):
    """Writes the lines between "<!-- NAME: begin -->" and "<!-- NAME: end -->" of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    with open(page) as file:
        text = file.read()
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"{page} has no single pair of the lines {begin} and {end}: nothing was written there")
    text = text[:text.index(begin)] + "\n".join([begin, *lines, ""]) + text[text.index(end):]
    with open(page + ".part", "w") as file:
        file.write(text)
    os.replace(page + ".part", page)
    print(f"wrote {page}")
