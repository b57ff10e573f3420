"""Cloze that tells what its optimizer holds after a checkpoint was loaded."""

import json

import torch

from launch import distributed, trainer
from launch.cli import main
from launch.engine import base_optimizer

_LINE = "LOADED "


def telling_main(command: list[str]) -> int:
    """The command in a process that prints a line after each resume."""
    resume = trainer.Trainer.resume

    def telling(self, step: int) -> None:
        resume(self, step)
        print(f"{_LINE}{json.dumps(_held(self.engine))}\n", end="", flush=True)

    trainer.Trainer.resume = telling
    return main(command)


def told(output: str) -> list[dict]:
    """What each process has told."""
    return [json.loads(line[len(_LINE):]) for line in output.splitlines() if line.startswith(_LINE)]


def _held(engine) -> dict:
    """Constants of each group, steps that were counted, and norms of the moments, whole though they are partitioned."""
    optimizer = base_optimizer(engine)
    states = [state for state in optimizer.state.values() if "exp_avg" in state]
    squares = torch.tensor([sum(float(state[name].double().square().sum()) for state in states)
                            for name in ("exp_avg", "exp_avg_sq")], dtype=torch.float64)
    if engine.zero_optimization_stage():
        squares = distributed.reduce_sum(squares.to(engine.device)).cpu()
    names = ("weight_decay", "betas", "eps", "lr")
    return {
        "groups": [{name: group[name] for name in names} for group in optimizer.param_groups],
        "steps": sorted({int(state["step"]) for state in states}),
        "moments": squares.sqrt().tolist(),
    }
