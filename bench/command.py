import subprocess


def first_line(command):
    """The first line of a command's standard output; empty if the command cannot be run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    return done.stdout.split("\n")[0]
