"""Scales losses, skips steps and trains in half precision with the real torch.amp and with lockstep, on a CPU, and
compares scales, counters and parameters after each step bit for bit.

usage: scaler_parity.py PROGRAM

Afterwards lockstep is broken on purpose, and the comparison must find each way.
"""

import sys
import tempfile

from parity import raw, require_same_library, run_program, torch, write

SCALER_STEPS, TRAIN_STEPS = 60, 40
CASES = {
    "scaler": "two losses and optimizers under one scaler, infinities and not-a-numbers on the way",
    "fused-adamw": "the same under `AdamW(fused=True)` and `SGD(fused=True)`, which divide and skip by themselves",
    "fused-adam": "the same under `Adam(fused=True)` with `amsgrad` and `SGD(fused=True)` with `nesterov`",
    "tf32": "`set_float32_matmul_precision(\"high\")`, on this CPU",
    "bf16": "autocast in bfloat16",
    "fp16": "autocast in float16 with a GradScaler, the first steps skipped",
}


def make_inputs(folder):
    torch.manual_seed(7)
    gradients = [torch.randn(SCALER_STEPS, 5, 3), torch.randn(SCALER_STEPS, 7)]
    gradients[0][5, 2, 1] = float("inf")
    gradients[0][6, 0, 0] = float("nan")
    gradients[1][20, 3] = -float("inf")
    gradients[0][33] = float("inf")
    gradients[1][33, 0] = float("nan")
    gradients[1][34, 6] = 3e38  # overflows when it is scaled
    net = make_net()
    tensors = {"gradients.0": gradients[0], "gradients.1": gradients[1], "parameter.0": torch.randn(5, 3),
               "parameter.1": torch.randn(7), "inputs": torch.randn(TRAIN_STEPS, 32, 64),
               "labels": torch.randint(10, (TRAIN_STEPS, 32))}  # fmt: skip
    tensors |= {f"net.{i}": parameter for i, parameter in enumerate(net.parameters())}
    for name, tensor in tensors.items():
        write(f"{folder}/{name}", raw(tensor))
    return tensors


def make_net():
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))


def scale_and_skip(tensors, make, states_of=lambda *_: []):
    parameters = [tensors[f"parameter.{i}"].clone().requires_grad_() for i in (0, 1)]
    one, two = make(*([parameter] for parameter in parameters))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=4)
    for step in range(SCALER_STEPS):
        one.zero_grad()
        two.zero_grad()
        for i in (0, 1):
            scaler.scale((parameters[i] * tensors[f"gradients.{i}"][step]).sum()).backward()
        if step % 3 == 0:
            scaler.unscale_(one)
            torch.nn.utils.clip_grad_norm_([parameters[0]], 1.0)
        scaler.step(one)
        scaler.step(two)
        scaler.update()
        state = scaler.state_dict()
        yield raw(torch.tensor(state["scale"])) + raw(torch.tensor(state["_growth_tracker"], dtype=torch.int32)) + b"".join(
            map(raw, parameters + states_of(one.state[parameters[0]], two.state[parameters[1]])))  # fmt: skip


def scale_plain(tensors):
    sgd = torch.optim.SGD
    return scale_and_skip(tensors, lambda one, two: (sgd(one, lr=0.1, momentum=0.9), sgd(two, lr=0.01)))


def scale_fused(tensors, kind, options, nesterov):
    def make(one, two):
        sgd = torch.optim.SGD(two, lr=0.01, momentum=0.9, nesterov=nesterov, fused=True)
        return kind(one, lr=0.01, fused=True, **options), sgd

    def states_of(adam, sgd):
        names = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return [adam[name] for name in names if adam.get(name) is not None] + [sgd["momentum_buffer"]]

    return scale_and_skip(tensors, make, states_of)


def train(tensors, dtype, scaler):
    net = make_net()
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(tensors[f"net.{i}"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(TRAIN_STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = torch.nn.functional.cross_entropy(net(tensors["inputs"][step]), tensors["labels"][step])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield b"".join(map(raw, net.parameters()))


def run_lockstep(program, folder, *mistake):
    run_program(program, folder, *mistake)
    found = {}
    for name in CASES:
        with open(f"{folder}/{name}.lockstep", "rb") as file:
            found[name] = file.read()
    return found


def main():
    program = sys.argv[1]
    require_same_library(program)
    torch.set_num_threads(1)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-precision-") as folder:
        tensors = make_inputs(folder)
        expected = {
            "scaler": list(scale_plain(tensors)),
            "fused-adamw": list(scale_fused(tensors, torch.optim.AdamW, {}, False)),
            "fused-adam": list(scale_fused(tensors, torch.optim.Adam, dict(weight_decay=0.1, amsgrad=True), True)),
            "bf16": list(train(tensors, torch.bfloat16, torch.amp.GradScaler("cpu", enabled=False))),
            "fp16": list(train(tensors, torch.float16, torch.amp.GradScaler("cpu", init_scale=16777216, growth_interval=8))),
        }
        torch.set_float32_matmul_precision("high")
        expected["tf32"] = list(train(tensors, None, torch.amp.GradScaler("cpu", enabled=False)))
        torch.set_float32_matmul_precision("highest")
        if expected["fp16"][0] != b"".join(raw(tensors[f"net.{i}"]) for i in range(4)):
            failures += 1
            print("the first step in float16 was not skipped, and should be")
        found = run_lockstep(program, folder)
        print("| behaviour | Python | lockstep |\n|---|---|---|")
        for name, text in CASES.items():
            length, steps = len(expected[name][0]), len(expected[name])
            wrong = [i for i in range(steps) if found[name][i * length : (i + 1) * length] != expected[name][i]]
            failures += bool(wrong)
            print(f"| {text} | {steps} steps | {f'DIFFERS at step {wrong[0]}' if wrong else 'same bits after each step'} |")
        for mistake in ("never", "kept"):
            broken = run_lockstep(program, folder, mistake)
            for name in ("scaler", "fused-adamw", "fused-adam"):
                seen = broken[name] != b"".join(expected[name])
                failures += not seen
                print(f"broken on purpose ({mistake}), {name}: {'found' if seen else 'NOT FOUND'}")
    if failures:
        sys.exit(f"{failures} comparisons failed")


if __name__ == "__main__":
    main()
