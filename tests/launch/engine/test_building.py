"""The engine, built."""

from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfigError

from cloze.launch.config import PretrainConfig, TrainConfig
from cloze.launch.engine.building import build_deepspeed
from cloze.launch.engine.config import deepspeed_config
from cloze.pipeline.errors import UserError


@pytest.mark.parametrize(
    "error",
    [
        AssertionError(),
        AttributeError("'NoneType' object has no attribute 'get'"),
        TypeError("must be a mapping"),
        DeepSpeedConfigError("has been removed"),
    ],
)
def test_what_deepspeed_says_is_the_users_to_mend_only_if_a_setting_is_the_users(monkeypatch, error):
    def refuse(**_):
        raise error

    monkeypatch.setattr(deepspeed.comm.comm, "cdb", SimpleNamespace())
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **_: None)
    monkeypatch.setattr(deepspeed, "initialize", refuse)
    for settings, expected in (({"wall_clock_breakdown": True}, UserError), ({}, type(error))):
        config = PretrainConfig("", "", deepspeed=settings, train=TrainConfig(learning_rate=1e-3))
        with pytest.raises(expected) as raised:
            build_deepspeed(torch.nn.Linear(1, 1), config, deepspeed_config(config, 1), torch.device("cpu"))
        assert not settings or f"({str(error) or 'AssertionError'})" in str(raised.value)
