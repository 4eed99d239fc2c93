"""What the comparisons with the real torch package share. Importing it ends the test as skipped where there is none."""

import multiprocessing
import os
import subprocess
import sys

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["OMP_NUM_THREADS"] = "1"


def skip(why):
    print(f"SKIPPED {os.path.basename(sys.argv[0])}: {why}")
    sys.exit(77)


try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    skip(f"no torch package ({error})")


def require_same_library(program):
    """Bits are compared only where the program loads the libtorch_cpu.so that this Python does."""
    theirs = subprocess.run([program, "--library"], capture_output=True, text=True).stdout.strip()
    own = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    if os.path.realpath(theirs) != os.path.realpath(own):
        skip(f"the program loads {theirs}, the Python package {own}; their bits may differ")


def raw(tensor):
    """A tensor's elements as bytes, in the order of a contiguous one."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return tensor.view(torch.uint8).numpy().tobytes()


def write(path, content):
    with open(path, "wb") as file:
        file.write(content)


def import_before_fork():
    """DDP and the optimizers import this at their first use, which takes 1.4 s: once here instead of in each process."""
    import torch._dynamo  # noqa: F401


def run_forked(function, *args):
    """In a process of its own: one that has run operators should not fork ranks."""
    import_before_fork()
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit("the Python side failed")


def worker(function, rank, ranks, args, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    function(rank, ranks, *args)
    dist.destroy_process_group()


def run_python(ranks, function, output, *args):
    """Runs function(rank, ranks, output, *args) on that many Gloo ranks; output is a folder that it makes."""
    os.makedirs(output)
    import_before_fork()
    # fork: the torch package is imported once
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=worker, args=(function, rank, ranks, (output, *args), f"{output}/rendezvous"))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("the Python side failed")


def run_program(program, *words, timeout=600):
    """What the program prints."""
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        sys.exit(f"{program} failed with {' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")
    return done.stdout
