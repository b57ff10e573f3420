"""Cloze that tells what its optimizer holds after a checkpoint was loaded, and in which formats it computes."""

import json

import torch

from cloze.launch.cli import main
from cloze.launch.config import OptimizerConfig
from cloze.launch.engine.fragments import base_optimizer
from cloze.launch.engine.optimizers import build_optimizer
from cloze.launch.system import distributed
from cloze.launch.training import loop, start

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
    """The command in a process that prints a line after its first step: formats of what was seen in it."""
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
