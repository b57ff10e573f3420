"""What Cloze repairs in DeepSpeed."""

from types import SimpleNamespace

import pytest
import torch

from cloze.launch.engine.repairs import check_steps, kept_hyper_parameters
from cloze.pipeline.errors import UserError


def test_a_resume_after_skipped_fp16_steps_expects_fewer_optimizer_steps():
    """Adam has seen 997 of 1000 steps; DeepSpeed's ZeRO-3 loader shares one step tensor and mixes up the groups."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": parameters[:1], "weight_decay": 0.5}, {"params": parameters[1:]}])
    engine = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer), zero_optimization=lambda: True)

    def load():
        shared = torch.tensor(997.0)
        for parameter, group in zip(parameters, optimizer.param_groups, strict=True):
            optimizer.state[parameter]["step"] = shared
            group["weight_decay"] = 0.5

    with kept_hyper_parameters(engine):
        load()
    check_steps(engine, 1000 - 3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.01]
    first, second = (optimizer.state[parameter]["step"] for parameter in parameters)
    assert first is not second and first == second == 997
    with pytest.raises(UserError, match="optimizer states of step 997 to 997, expected 1000"):
        check_steps(engine, 1000)
