"""Checks the trace and the page that report_program writes: the trace's structure, and the page in a headless Chromium."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile

from parity import run_program, skip

RANKS = 2


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def strict_json(path):
    """The file's value: RFC 8259, UTF-8, no key twice, no NaN or Infinity, also not as a number too large for a double."""

    def no_constant(word):
        sys.exit(f"FAILED: {word} is no JSON")

    def number(word):
        check(math.isfinite(float(word)), f"{word} is no double")
        return float(word)

    def pairs(items):
        check(len({key for key, _ in items}) == len(items), f"a key twice in {items}")
        return dict(items)

    with open(path, encoding="utf-8", errors="strict") as file:
        return json.load(file, parse_constant=no_constant, parse_float=number, object_pairs_hook=pairs)


# The metadata of the trace event format, each with its argument.
METADATA = {"process_name": ("name", str), "process_sort_index": ("sort_index", int),
            "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}


def format_fault(trace):
    """What the trace breaks of Chrome's trace event format (complete events and metadata; flows and others are not written)."""
    if not isinstance(trace, dict) or trace.keys() - {"traceEvents", "displayTimeUnit", "otherData"}:
        return "the keys of the file"
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns") or not isinstance(trace.get("traceEvents"), list):
        return "the unit or the list of events"
    named = set()  # metadata that is there already
    for event in trace["traceEvents"]:
        keys = {"ph": str, "name": str, "pid": int, "tid": int, "args": dict}
        if event.get("ph") == "X":
            keys |= {"ts": float, "dur": float}
        if event.keys() != keys.keys():
            return f"the keys of {event}"
        for key, kind in keys.items():
            if type(event[key]) is not kind and not (kind is float and type(event[key]) is int):
                return f"the type of {key} in {event}"
        if not event["name"] or event["pid"] < 0 or event["tid"] < 0:
            return f"the name, process or thread of {event}"
        if event["ph"] == "X":
            if not (0 <= event["ts"] <= 2**53 and 0 <= event["dur"] <= 2**53):
                return f"the times of {event}"
            if ("process_name", event["pid"], 0) not in named or ("thread_name", event["pid"], event["tid"]) not in named:
                return f"a process or thread without a name before {event}"
        elif event["ph"] == "M":
            key, kind = METADATA.get(event["name"], ("", None))
            place = (event["name"], event["pid"], event["tid"] if event["name"].startswith("thread") else 0)
            if event["args"].keys() != {key} or type(event["args"][key]) is not kind or place in named:
                return f"the metadata {event}"
            named.add(place)
        else:
            return f"the phase of {event}"
    return ""


def break_trace(trace):
    """Breaks a trace in each way that format_fault must find."""
    span = next(i for i, event in enumerate(trace["traceEvents"]) if event["ph"] == "X")
    first = lambda copy: copy["traceEvents"][0]
    for mistake in (lambda t: t.update(events=[]), lambda t: t.update(displayTimeUnit="us"), lambda t: first(t).update(ph="Q"),
                    lambda t: first(t).update(name="clock_error_us"), lambda t: first(t).update(pid="0"),
                    lambda t: t["traceEvents"].append(first(t)), lambda t: t["traceEvents"].pop(0),
                    lambda t: t["traceEvents"][span].update(ts=-1.0), lambda t: t["traceEvents"][span].update(dur="1"),
                    lambda t: t["traceEvents"][span].pop("tid"), lambda t: t["traceEvents"][span].update(tid=99)):
        copy = json.loads(json.dumps(trace))
        mistake(copy)
        yield copy


def check_trace(path):
    trace = strict_json(path)
    check(not format_fault(trace), f"the format: {format_fault(trace)}")
    for number, broken in enumerate(break_trace(trace)):
        check(format_fault(broken), f"mistake {number} is not found")
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    check({event["ph"] for event in events} == {"X", "M"}, "complete events and metadata")
    check({event["pid"] for event in events} == set(range(RANKS)), "every rank is a process")
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    # Perfetto merges the threads 0 and N of process N into one track.
    threads = [thread for _, thread in lanes]
    check(len(set(threads)) == len(threads) and min(threads) > RANKS, f"the numbers of the threads: {threads}")
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


def check_namespaces(program):
    """A trace of ranks whose steady clocks are an hour apart: rank 1 has a time namespace of its own."""
    namespace = ["unshare", "--time", "--monotonic", "3600", "--boottime", "3600"]
    for flags in (["--fork"], ["--fork", "--map-root-user"]):
        try:
            tried = subprocess.run([*namespace, *flags, "true"], capture_output=True, text=True)
        except OSError as error:
            tried = subprocess.CompletedProcess([], 1, stderr=str(error))
        if tried.returncode == 0:
            break
    else:
        print(f"SKIPPED in part: no time namespace for the clocks of a trace ({tried.stderr.strip()})")
        return
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        for rank in range(RANKS):
            environment = {**os.environ, **master, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            command = [*(namespace + flags if rank == 1 else []), program, folder, "clocks", "0", "0"]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for process in processes:
            output, _ = process.communicate(timeout=300)
            check(process.returncode == 0, f"a rank in a time namespace ended with {process.returncode}:\n{output}")
        events = strict_json(os.path.join(folder, "trace.json"))["traceEvents"]
    for number in (5, 6, 7):
        of_step = [event for event in events if event["name"].startswith("bucket 1 of") and event["args"]["step"] == number]
        check(len(of_step) == RANKS, f"a bucket of each rank in step {number}")
        gap = max(event["ts"] for event in of_step) - min(event["ts"] + event["dur"] for event in of_step)
        check(gap < 1e4, f"a reduction ends {gap} us before it begins")
    print("two steady clocks an hour apart: one trace")


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
        check_namespaces(program)
        print("%d bars, %d curves" % check_page(os.path.join(folder, "report.html")))


main(sys.argv[1])
