"""Steps the same parameters with the same gradients in Python's optimizers and in lockstep's, 50 steps, and compares
parameters and states bit for bit; the same for clipping and for averages of parameters. Schedules are compared with
Python's to 1e-12.

usage: optim_parity.py PROGRAM

Afterwards lockstep is broken on purpose, and the comparison must find each way.
"""

import os
import shutil
import sys
import tempfile
import warnings

from parity import raw, require_same_library, run_program, torch

STEPS = 50
SHAPES = [(64, 96), (96,), (7,), (4, 3, 5, 5), (3, 5), (1,), (33000,)]
CHANNELS_LAST = 3
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "complex64": torch.complex64}
SGD = dict(lr=0.05, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)
ADAM = dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False)

SGD_CASES = {
    "plain": {}, "maximize": dict(maximize=True), "decay": dict(weight_decay=0.01), "momentum": dict(momentum=0.9),
    "dampening": dict(momentum=0.9, dampening=0.1), "nesterov": dict(momentum=0.9, nesterov=True),
    "nesterov-decay": dict(momentum=0.9, nesterov=True, weight_decay=0.01),
    "all": dict(momentum=0.8, dampening=0.2, weight_decay=0.02, maximize=True),
}  # fmt: skip
ADAM_CASES = {
    "plain": {}, "betas": dict(beta1=0.4, beta2=0.7), "eps": dict(eps=1e-3), "decay": dict(weight_decay=0.1),
    "amsgrad": dict(amsgrad=True), "maximize": dict(maximize=True),
    "all": dict(beta1=0.8, beta2=0.95, weight_decay=0.03, amsgrad=True, maximize=True),
}  # fmt: skip


def optimizer_cases():
    """name, optimizer, implementation, dtype, late, tensor_rate, options; those named "groups" have two"""
    for implementation in ("default", "foreach", "fused"):
        for dtype in ("float32", "float64", "bfloat16"):
            for option, given in SGD_CASES.items():
                late = option == "momentum" and implementation != "fused"
                yield option, "sgd", implementation, dtype, late, False, {**SGD, **given}
            for optimizer in ("adam", "adamw"):
                for option, given in ADAM_CASES.items():
                    decay = dict(weight_decay=0.01) if optimizer == "adamw" else {}
                    yield option, optimizer, implementation, dtype, option == "betas", False, {**ADAM, **decay, **given}
            yield "decoupled", "adam", implementation, dtype, False, False, {**ADAM, "weight_decay": 0.1, "decoupled": True}
    for implementation in ("default", "foreach"):
        yield "complex", "sgd", implementation, "complex64", False, False, {**SGD, "momentum": 0.9}
        for optimizer in ("adam", "adamw"):
            yield "complex", optimizer, implementation, "complex64", False, False, {**ADAM, "amsgrad": True, "weight_decay": 0.1}
    for implementation in ("default", "fused"):
        yield "tensor-rate", "sgd", implementation, "float32", False, True, {**SGD, "momentum": 0.9}
        for optimizer in ("adam", "adamw"):
            yield "tensor-rate", optimizer, implementation, "float32", False, True, {**ADAM, "weight_decay": 0.1}
    yield "tensor-rate", "sgd", "foreach", "float32", False, True, SGD
    for implementation in ("default", "foreach", "fused"):
        yield "groups", "sgd", implementation, "float32", False, False, {**SGD, "momentum": 0.9, "weight_decay": 0.01}
        for optimizer in ("adam", "adamw"):
            yield "groups", optimizer, implementation, "float32", False, False, {**ADAM, "weight_decay": 0.1}


CLIPS = [("2", 1.0, 0), ("2", 1e9, 0), ("1", 1.0, 0), ("inf", 0.5, 0), ("3.5", 2.0, 0), ("2", 1.0, 1), ("value", 0.25, 0)]
AVERAGES = [(0.9, 0), (0.999, 0), (0.3, 1)]


def number(value):
    return repr(float(value))


def write_inputs(folder):
    generator = torch.Generator().manual_seed(3407)
    draw = lambda: [torch.randn(shape, generator=generator, dtype=torch.complex64) for shape in SHAPES]
    parameters, gradients = draw(), [draw() for _ in range(STEPS)]
    for name, dtype in DTYPES.items():
        cast = lambda t: t if dtype.is_complex else t.real.to(dtype)
        for file, tensors in (("parameters", parameters), ("gradients", sum(gradients, []))):
            with open(f"{folder}/{file}.{name}", "wb") as out:
                for tensor in tensors:
                    out.write(raw(cast(tensor)))
    return parameters, gradients


def write_cases(folder, names=None):
    """The cases of these names, all by default."""
    with open(f"{folder}/cases", "w") as file:
        for option, optimizer, implementation, dtype, late, tensor_rate, o in optimizer_cases():
            words = [f"{optimizer}.{implementation}.{dtype}.{option}", optimizer, implementation, dtype, STEPS, int(late),
                     int(tensor_rate), int(option == "groups")]  # fmt: skip
            words += [int(o.get(key, False)) for key in ("nesterov", "maximize", "amsgrad", "decoupled")]
            words += [number(o.get(k, 0)) for k in ("lr", "momentum", "dampening", "weight_decay", "beta1", "beta2", "eps")]
            if names is None or words[0] in names:
                print("optimize", *words, file=file)
        for kind, limit, mixed in CLIPS:
            name = f"clip.{kind}.{limit}.{mixed}"
            if names is None or name in names:
                print("clip", name, "-1" if kind == "value" else kind, limit, mixed, file=file)
        for decay, buffers in AVERAGES:
            name = f"average.{decay}.{buffers}"
            if names is None or name in names:
                print("average", name, decay, buffers, file=file)
        print("schedule", file=file)


def placed(tensor, index):
    tensor = tensor.detach().clone()
    return tensor.contiguous(memory_format=torch.channels_last) if index == CHANNELS_LAST else tensor


def optimize(case, inputs):
    option, optimizer, implementation, dtype, late, tensor_rate, options = case
    cast = lambda t: t if DTYPES[dtype].is_complex else t.real.to(DTYPES[dtype])
    parameters = [placed(cast(t), i).requires_grad_() for i, t in enumerate(inputs[0])]
    options = dict(options)
    if tensor_rate:
        options["lr"] = torch.tensor(options["lr"])
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if options.pop("decoupled", False):
        options["decoupled_weight_decay"] = True
    if implementation != "default":
        options[implementation] = True
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    grouped = [dict(params=parameters[::2], lr=options["lr"] / 10, weight_decay=0.2), dict(params=parameters[1::2])]
    made = kind(grouped if option == "groups" else parameters, **options)
    for step in range(STEPS):
        for i, parameter in enumerate(parameters):
            parameter.grad = None if late and i == 1 and step < 3 else placed(cast(inputs[1][step][i]), i)
        made.step()
    result = b"".join(raw(parameter) for parameter in parameters)
    keys = ["momentum_buffer"] if optimizer == "sgd" else ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    states = b"".join(
        raw(made.state[p][key]) for p in parameters for key in keys if made.state[p].get(key) is not None
    )
    return result, states


def clip(kind, limit, mixed, inputs):
    parameters = []
    for i, tensor in enumerate(inputs[1][0]):
        gradient = placed(tensor.real, i)
        if mixed and i % 3:
            gradient = gradient.to(torch.float64 if i % 3 == 1 else torch.bfloat16)
        parameters.append(torch.zeros_like(gradient, requires_grad=True))
        parameters[-1].grad = gradient
    if kind == "value":
        torch.nn.utils.clip_grad_value_(parameters, limit)
        return b"".join(raw(p.grad) for p in parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type=float(kind))
    return raw(norm) + b"".join(raw(p.grad) for p in parameters)


def average(decay, buffers, inputs):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = torch.nn.Module()
    for i, tensor in enumerate(inputs[0]):
        model.register_parameter(f"p{i}", torch.nn.Parameter(placed(tensor.real, i)))
    model.register_buffer("mean", torch.full((5,), 2.0))
    model.register_buffer("count", torch.tensor(3))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=bool(buffers))
    with torch.no_grad():
        for step in range(STEPS):
            for i, parameter in enumerate(model.parameters()):
                parameter.add_(placed(inputs[1][step][i].real, i), alpha=0.1)
            model.mean.add_(0.3)
            model.count.add_(7)
            averaged.update_parameters(model)
    module = averaged.module
    return b"".join(raw(t) for t in [*module.parameters(), *module.buffers()])


def curves():
    from torch.optim import lr_scheduler as s

    def run(make):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler, values = make(optimizer), []
        for _ in range(101):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return values

    sequence = lambda o, first, second, at: s.SequentialLR(o, [first(o), second(o)], [at])
    return {
        "constant": run(lambda o: s.ConstantLR(o, 0.25, 30)),
        "linear": run(lambda o: s.LinearLR(o, 0.1, 1.0, 40)),
        "linear-down": run(lambda o: s.LinearLR(o, 1.0, 0.2, 60)),
        "cosine": run(lambda o: s.CosineAnnealingLR(o, 100)),
        "cosine-floor": run(lambda o: s.CosineAnnealingLR(o, 100, 0.05)),
        "polynomial": run(lambda o: s.PolynomialLR(o, 70, 1.0)),
        "polynomial-2": run(lambda o: s.PolynomialLR(o, 70, 2.5)),
        "step": run(lambda o: s.StepLR(o, 30, 0.3)),
        "multi-step": run(lambda o: s.MultiStepLR(o, [20, 50, 50, 80], 0.5)),
        "exponential": run(lambda o: s.ExponentialLR(o, 0.97)),
        "warm-up-cosine": run(lambda o: sequence(
            o, lambda o: s.LinearLR(o, 0.01, 1.0, 10), lambda o: s.CosineAnnealingLR(o, 90), 10)),
        "warm-up-step": run(lambda o: sequence(
            o, lambda o: s.LinearLR(o, 0.2, 1.0, 5), lambda o: s.StepLR(o, 25, 0.1), 5)),
    }  # fmt: skip


def compare_curves(folder, expected):
    with open(f"{folder}/out/curves") as file:
        actual = {line.split()[0]: [float(word) for word in line.split()[1:]] for line in file}
    for name, values in expected.items():
        off = max(abs(a - b) for a, b in zip(values, actual[name], strict=True))
        yield name, "equal to 1e-12" if off <= 1e-12 else f"differs by {off:.3g}", off > 1e-12


def clip_words(kind, limit, mixed):
    if kind == "value":
        return f"gradients clipped by value | `clip_grad_value_({limit:g})`"
    return f"gradients{' of three dtypes' if mixed else ''} clipped by norm | `clip_grad_norm_({limit:g}, norm_type={kind})`"


def average_words(decay, buffers):
    of = "parameters and buffers" if buffers else "parameters"
    return f"an exponential moving average of {of} | `AveragedModel`, decay {decay}, {STEPS} steps"


def run_lockstep(program, folder, *mistake):
    shutil.rmtree(f"{folder}/out", ignore_errors=True)
    os.makedirs(f"{folder}/out")
    run_program(program, folder, *mistake)


def read(folder, name):
    with open(f"{folder}/out/{name}", "rb") as file:
        return file.read()


def main():
    program = sys.argv[1]
    require_same_library(program)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-optim-parity-") as folder:
        inputs = write_inputs(folder)
        write_cases(folder)
        run_lockstep(program, folder)
        results, table = {}, {}
        for case in optimizer_cases():
            option, optimizer, implementation, dtype = case[:4]
            name = f"{optimizer}.{implementation}.{dtype}.{option}"
            parameters, states = results[name] = optimize(case, inputs)
            actual = read(folder, name)
            right = actual == parameters + states
            if not right:
                failures += 1
                what = "states" if actual[: len(parameters)] == parameters else "parameters"
                print(f"{name}: the {what} differ")
            row = table.setdefault((optimizer, option), {})
            row.setdefault(implementation, []).append(f"{dtype}{'' if right else ' DIFFERS'}")
        print(f"note: {STEPS} steps, compared with each of Python's implementations; \"-\" where Python has none.\n")
        print("| optimizer | options | Python's default | `foreach=True` | `fused=True` |\n|---|---|---|---|---|")
        short = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "complex64": "c64"}
        for (optimizer, option), row in table.items():
            cells = []
            for implementation in ("default", "foreach", "fused"):
                words = row.get(implementation)
                cells.append("same bits: " + " ".join(short.get(w, w) for w in words) if words else "-")
            print("|", optimizer, "|", option, "|", " | ".join(cells), "|")

        others = {f"clip.{k}.{l}.{m}": clip(k, l, m, inputs) for k, l, m in CLIPS}
        others |= {f"average.{d}.{b}": average(d, b, inputs) for d, b in AVERAGES}
        words = {f"clip.{k}.{l}.{m}": clip_words(k, l, m) for k, l, m in CLIPS}
        words |= {f"average.{d}.{b}": average_words(d, b) for d, b in AVERAGES}
        print("\n| behaviour | Python | lockstep |\n|---|---|---|")
        for name, expected in others.items():
            right = read(folder, name) == expected
            failures += not right
            print(f"| {words[name]} | {'same bits' if right else 'DIFFERS'} |")
        for name, text, wrong in compare_curves(folder, expected_curves := curves()):
            failures += wrong
            print(f"| the rate, by the schedule {name} | `torch.optim.lr_scheduler`, 101 steps | {text} |")

        # The comparison finds what is broken.
        for mistake, names in {
            "eps": ["adam.default.float32.plain", "clip.2.1.0.0", "average.0.9.0"],
            "step": ["sgd.default.float32.plain", "adamw.fused.float32.plain"],
            "skipped": ["sgd.foreach.float32.momentum", "adam.foreach.float32.plain"],
            "float": ["sgd.default.float64.plain", "adam.default.float64.plain"],
        }.items():
            write_cases(folder, names)
            run_lockstep(program, folder, mistake)
            for name in names:
                expected = others.get(name) or results[name][0]
                found = read(folder, name)[: len(expected)] != expected
                failures += not found
                print(f"broken on purpose ({mistake}), {name}: {'found' if found else 'NOT FOUND'}")
            if mistake == "step":
                found = all(wrong for name, _, wrong in compare_curves(folder, expected_curves) if name == "cosine")
                failures += not found
                print(f"broken on purpose (step), schedule: {'found' if found else 'NOT FOUND'}")
    if failures:
        sys.exit(f"{failures} comparisons failed")


if __name__ == "__main__":
    main()
