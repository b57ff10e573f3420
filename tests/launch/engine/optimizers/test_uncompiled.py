"""torch's optimizers without their wrappers for torch.compile: the same steps, and no compiler imported."""

import sys
from functools import partial

import pytest
import torch

from cloze.launch.engine.optimizers.uncompiled import without_compiler
from tests.forked import ForkedRun
from tests.launching import finish


def train(fused: bool) -> dict:
    """Weights and states of AdamW after some steps, before which its states are loaded."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    losses = []

    def loss() -> torch.Tensor:
        losses.append(model(torch.ones(5)).sum())
        return losses[-1]

    for step in range(6):
        if step == 3:
            states = optimizer.state_dict()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
            optimizer.load_state_dict(states)
        optimizer.zero_grad()
        model(torch.randn(7, 5)).square().sum().backward()
        optimizer.step(loss)
    assert all(each.requires_grad for each in losses), "a closure may call backward"
    return {"weights": model.state_dict(), "states": optimizer.state_dict()["state"]}


def uncompiled(command: list[str], fused: bool) -> int:
    """Train in a process that has no compiler yet, and write what came of it to the file that is named."""
    assert "torch._dynamo" not in sys.modules, "imported before this test"
    without_compiler()
    torch.save(train(fused), command[0])
    return int("torch._dynamo" in sys.modules)


@pytest.mark.parametrize("fused", [True, False])
def test_steps_are_those_of_torch(tmp_path, fused):
    finish(ForkedRun([str(tmp_path / "found")], main=partial(uncompiled, fused=fused)))
    torch.testing.assert_close(torch.load(tmp_path / "found"), train(fused), rtol=0, atol=0)
