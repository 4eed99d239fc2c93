"""Checks the trace and the page that report_program writes: the trace's structure, and the page in a headless Chromium."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

from parity import run_program, skip

RANKS = 2


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def check_trace(path):
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    check({event["ph"] for event in events} == {"X", "M"}, "complete events and metadata")
    check({event["pid"] for event in events} == set(range(RANKS)), "every rank is a process")
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    check(all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans), "times from the first step on")
    reductions = 0
    for rank in range(RANKS):
        own = [event for event in spans if event["pid"] == rank]
        steps = {event["args"]["step"]: event for event in own if event["name"].startswith("step ")}
        check(sorted(steps) == [4, 5, 6, 7], f"the steps of rank {rank}: {sorted(steps)}")
        for number, step in steps.items():
            inside = [event for event in own if event["args"]["step"] == number and event is not step]
            names = {event["name"] for event in inside}
            check(names >= {"forward", "backward", "communication", "optimizer"}, f"the phases {names}")
            # To a nanosecond each, as the file rounds.
            first = min(event["ts"] for event in inside if lanes[rank, event["tid"]] == "phases")
            end = max(event["ts"] + event["dur"] for event in inside if lanes[rank, event["tid"]] == "phases")
            check(step["ts"] - 0.01 <= first and end <= step["ts"] + step["dur"] + 0.01, "the phases lie in the step")
            backward = next(event for event in inside if event["name"] == "backward")
            buckets = [event for event in inside if event["name"].startswith("bucket ")]
            check(len(buckets) >= 3, f"{len(buckets)} buckets")
            for bucket in buckets:
                check(backward["ts"] <= bucket["ts"], "no bucket before its backward")
                check(bucket["ts"] + bucket["dur"] <= step["ts"] + step["dur"] + 0.01, "no bucket after its step")
                check(bucket["args"]["bytes"] > 0 and lanes[rank, bucket["tid"]].startswith("all-reduce buckets"), "bucket")
            check(any(bucket["ts"] < backward["ts"] + backward["dur"] for bucket in buckets), "a bucket over the backward")
            reductions += len(buckets)
        for lane in {event["tid"] for event in own}:  # a lane's spans do not overlap
            order = sorted((event for event in own if event["tid"] == lane), key=lambda event: event["ts"])
            for one, after in zip(order, order[1:]):
                check(one["ts"] + one["dur"] <= after["ts"] + 0.01, f"{one} overlaps {after}")
    # The ranks of one host share a clock, and a reduction ends on no rank before it has begun on all.
    for number in (5, 6, 7):
        of_step = [event for event in spans if event["name"].startswith("bucket 1 of") and event["args"]["step"] == number]
        check(max(event["ts"] for event in of_step) <= min(event["ts"] + event["dur"] for event in of_step), "one clock")
    return len(spans), reductions


def check_page(path):
    with open(path) as file:
        page = file.read()
    for part in ("http://", "https://", "src=", "@import", "url("):
        left = page.replace("http://www.w3.org/2000/svg", "")
        check(part not in left, f"the page refers to {part}")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        skip("the trace is checked, but there is no Chromium for the page")
    with tempfile.TemporaryDirectory() as profile:
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
                 f"--user-data-dir={profile}", "--enable-logging=stderr", "--dump-dom", f"file://{path}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    dom = done.stdout.split("<script>")[0]
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    check(not errors, f"the page has errors: {errors}")
    for text in ("Loss", "accuracy", "Samples per second of each rank", "Where the time of a step goes", "Stragglers",
                 "the reduction of each bucket", "Environment", "optimizer step", "samples/s", "mean time of a step in ms",
                 "2 ranks on 1 host, 4 epochs, 32 steps", "Rank 1 was last in", "three classes &lt;/script&gt;"):
        check(text in dom, f"the page does not show '{text}'")
    check("NaN" not in dom and "undefined" not in dom, "a value of the page is not drawn")
    return dom.count("<rect"), dom.count("<polyline")


def main(program):
    with tempfile.TemporaryDirectory() as folder:
        run_program(program, folder, "--nproc", RANKS)
        print("%d spans, %d reductions of buckets" % check_trace(os.path.join(folder, "trace.json")))
        print("%d bars, %d curves" % check_page(os.path.join(folder, "report.html")))


main(sys.argv[1])
