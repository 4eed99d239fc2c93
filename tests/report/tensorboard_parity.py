"""Reads the files of report_program back: event files by the tensorboard package, CSV and JSON Lines by Python."""

import csv
import glob
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import venv

from parity import run_program, skip


def restart_with_tensorboard():
    """Runs this script in an environment with the package, which it makes beside the program once."""
    folder = os.path.join(os.path.dirname(os.path.abspath(sys.argv[1])), "python-tensorboard")
    python = os.path.join(folder, "bin", "python3")
    if os.environ.get("LOCKSTEP_TEST_HAS_TENSORBOARD"):
        skip("the environment with the tensorboard package does not import it")
    if not os.path.exists(os.path.join(folder, "complete")):
        try:
            venv.create(folder, system_site_packages=True, with_pip=True, clear=True)
            done = subprocess.run([python, "-m", "pip", "install", "--quiet", "tensorboard"], capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            skip(f"no tensorboard package, and no environment for one ({error})")
        if done.returncode:
            skip("no tensorboard package, and pip cannot install it: " + (done.stderr.strip().splitlines() or ["?"])[-1])
        open(os.path.join(folder, "complete"), "w").close()
    # The new environment sees the packages of the system, not those of an environment that runs this script.
    paths = [os.environ.get("PYTHONPATH", "")] + [path for path in sys.path if path.endswith("-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LOCKSTEP_TEST_HAS_TENSORBOARD": "1"}
    os.execve(python, [python, *sys.argv], environment)


try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
except ImportError:
    restart_with_tensorboard()


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def series(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def single(value):
    """The nearest float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def check_resumed(program):
    """A run that ends after its third epoch, resumed after its second one, and a new run in the same folder."""
    with tempfile.TemporaryDirectory() as folder:
        def run(*words):
            run_program(program, folder, "a run", *words, "--nproc", 2)
            events = EventAccumulator(f"{folder}/board")
            events.Reload()
            tags = "train/loss", "epoch/loss", "test/accuracy"
            return [[step for step, _ in series(events, tag)] for tag in tags], series(events, "train/loss")

        run(1, 2)
        steps, losses = run()
        check(steps[0] == list(range(32)), f"each step once after a resume: {steps[0]}")
        check(steps[1:] == [[7, 15, 23, 31]] * 2, f"each epoch once after a resume: {steps[1:]}")
        os.remove(f"{folder}/checkpoint.pt")
        steps, again = run(0, 0)
        check(steps == [list(range(8)), [7], [7]] and again == losses[:8], f"a new run in the folder: {steps}")


def main(program):
    check_resumed(program)
    with tempfile.TemporaryDirectory() as folder:
        run_program(program, folder, "--nproc", 2)
        files = glob.glob(f"{folder}/board/*")
        check(len(files) == 1 and "/events.out.tfevents." in files[0], f"one event file, not {files}")

        # Ends before the first record whose checksum is wrong, and throws for one that is no Event.
        loaded = list(EventFileLoader(files[0]).Load())
        check(loaded and loaded[0].file_version == "brain.Event:2", "the first event has the version")
        check(all(event.wall_time > 1e9 for event in loaded), "every event has a time")

        with open(f"{folder}/metrics.jsonl") as file:
            rows = [json.loads(line) for line in file]
        steps = [row for row in rows if row["event"] == "step"]
        epochs = [row for row in rows if row["event"] == "epoch"]
        check([row["step"] for row in steps] == list(range(32)), "a row of each step")
        check([row["epoch"] for row in epochs] == [0, 1, 2, 3], "a row of each epoch")
        check(rows[-1] | {"time": 0} == {"time": 0, "event": "scalar", "tag": "test/nan", "value": "NaN", "step": 0}, "NaN as a string")

        events = EventAccumulator(f"{folder}/board")
        events.Reload()
        tags = {"train/loss", "train/lr", "train/samples_per_second", "epoch/loss", "epoch/seconds", "test/accuracy", "test/nan"}
        check(set(events.Tags()["scalars"]) == tags, f"the tags {events.Tags()['scalars']}")
        check(series(events, "train/loss") == [(row["step"], single(row["loss"])) for row in steps], "the losses of the steps")
        check(series(events, "train/lr") == [(step, single(0.1)) for step in range(32)], "the learning rates")
        check(all(value > 0 for _, value in series(events, "train/samples_per_second")), "samples per second")
        losses_of_epochs = [(row["step"] - 1, single(row["loss"])) for row in epochs]
        check(series(events, "epoch/loss") == losses_of_epochs, "the losses of the epochs, at their last steps")
        accuracies = [(row["step"], row["value"]) for row in rows if row.get("tag") == "test/accuracy"]
        check([step for step, _ in accuracies] == [8, 16, 24, 32], "an accuracy of each epoch")
        check(series(events, "test/accuracy") == [(step - 1, single(value)) for step, value in accuracies], "the accuracy")
        ((step, value),) = series(events, "test/nan")
        check(step == -1 and math.isnan(value), "NaN at a negative step")

        events = EventAccumulator(f"{folder}/by_hand")
        events.Reload()
        check(series(events, "loss") == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3)], f"a resumed loop by hand: {series(events, 'loss')}")

        with open(f"{folder}/metrics.csv", newline="") as file:
            table = list(csv.DictReader(file))
        check([float(row["loss"]) for row in table if row["event"] == "step"] == [row["loss"] for row in steps], "the losses of the CSV file")
        check([row["tag"] for row in table if row["event"] == "scalar"] == ["test/accuracy"] * 4, "the scalars of the CSV file")
        print(f"{len(loaded)} events, {len(rows)} lines, {len(table)} rows read back")


main(sys.argv[1])
