"""Cloze that tells what its optimizer holds after a checkpoint was loaded, and in which formats it computes."""

import json

import torch

from cloze.launch.cli import main
from cloze.launch.config import OptimizerConfig
from cloze.launch.engine.fragments import base_optimizer
from cloze.launch.engine.optimizers import build_optimizer
from cloze.launch.system import distributed
from cloze.launch.training import loop, recipe, start

_LINE = "TOLD "


def compile_deepspeed_adam() -> None:
    """Compile DeepSpeed's AdamW, which takes 150 s of processor time, before a run that must not take long."""
    build_optimizer(torch.nn.Linear(1, 1), OptimizerConfig(implementation="deepspeed"), 1e-3, states_on_cpu=True)


def resumes_main(command: list[str]) -> int:
    """The command in a process that prints a line after each resume."""
    resume = start.resume

    def telling(step, checkpoints, engine, *arguments) -> None:
        resume(step, checkpoints, engine, *arguments)
        _tell(_held(engine))

    start.resume = telling
    return main(command)


def formats_main(command: list[str]) -> int:
    """The command in a process that prints a line after each step: formats of what was seen in it. Its CPU takes twice
    as long for products in bf16.
    """
    recipe.bf16_slowdown = lambda device: 2.0
    make_step = loop.Loop.step

    def telling(self, *arguments):
        seen: dict[str, set[torch.dtype]] = {"products": set(), "gradients": set(), "masters": set(), "moments": set()}
        layer = self.engine.model.bert.encoder.layers[0].feed_forward
        hooks = [
            linear.register_forward_hook(lambda module, inputs, output: seen["products"].add(output.dtype))
            for linear in layer.modules()
            if isinstance(linear, torch.nn.Linear)
        ]
        optimizer = base_optimizer(self.engine._deepspeed)
        step = optimizer.step

        def watched(*inner, **options):
            updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            seen["masters"] |= {parameter.dtype for parameter in updated}
            seen["gradients"] |= {parameter.grad.dtype for parameter in updated if parameter.grad is not None}
            result = step(*inner, **options)
            seen["moments"] |= {state["exp_avg"].dtype for state in optimizer.state.values() if "exp_avg" in state}
            return result

        optimizer.step = watched
        make_step(self, *arguments)
        optimizer.step = step
        for hook in hooks:
            hook.remove()
        seen["parameters"] = {parameter.dtype for parameter in self.engine.model.parameters()}
        _tell({name: sorted(map(str, found)) for name, found in seen.items()})

    loop.Loop.step = telling
    return main(command)


def _tell(what: dict) -> None:
    print(f"{_LINE}{json.dumps(what)}\n", end="", flush=True)


def told(output: str) -> list[dict]:
    """What each process has reported."""
    return [json.loads(line[len(_LINE) :]) for line in output.splitlines() if line.startswith(_LINE)]


def assert_formats(output: str, precision: str, stage: str, processes: int, steps: int) -> None:
    """That the start table of a run with `formats_main` names what each step of each process has, and that 16 bits are
    advised against where they are slow.
    """
    products = "bf16" if precision == "autocast" else precision
    parameters = products if precision in ("bf16", "fp16") and stage != "0" else "fp32"
    assert output.count("--train.precision fp32 is faster") == (precision != "fp32"), "rank 0 says it"
    row = " ".join(output.split("│ precision ")[1].splitlines()[0].replace("│", " ").split())
    copies = "" if parameters == "fp32" else " with fp32 master copies"
    assert row == f"{products} products, {parameters} parameters{copies}"
    names = {"fp32": ["torch.float32"], "bf16": ["torch.bfloat16"], "fp16": ["torch.float16"]}
    seen = told(output)
    assert len(seen) == processes * steps
    for each in seen:
        assert (each["products"], each["parameters"]) == (names[products], names[parameters])
        updated = each["masters"], each["moments"], each["gradients"]
        assert updated == 3 * (names["fp32"],), "what is summed and updated is fp32"


def _held(engine) -> dict:
    """Constants of each group, steps that were counted, and norms of the moments, whole though they are partitioned."""
    optimizer = base_optimizer(engine._deepspeed)
    states = [state for state in optimizer.state.values() if "exp_avg" in state]
    squares = torch.tensor(
        [sum(float(state[name].double().square().sum()) for state in states) for name in ("exp_avg", "exp_avg_sq")],
        dtype=torch.float64,
    )
    if engine.stage:
        squares = distributed.reduce_sum(squares.to(engine.device)).cpu()
    names = ("weight_decay", "betas", "eps", "lr")
    return {
        "groups": [{name: group[name] for name in names} for group in optimizer.param_groups],
        "steps": sorted({int(state["step"]) for state in states}),
        "moments": squares.sqrt().tolist(),
    }
