"""What a run leaves to its device: decided once, kept by the run, reported where it differs."""

import json
import re
from dataclasses import replace

import pytest
import torch

from cloze.launch.config import FinetuneConfig, PretrainConfig, TrainConfig
from cloze.launch.pretrain import device_defaults
from cloze.launch.pretrain.first_model import build_model
from cloze.launch.run import runs
from cloze.launch.system.compiling import Lack
from cloze.launch.system.data_sheets import named_sheet
from cloze.model.config import BertConfig
from cloze.model.encoder import Attention
from cloze.pipeline.errors import UserError

GPU = torch.device("cuda", 0)


class Told(list):
    """A console."""

    warn = list.append


@pytest.fixture
def machine(monkeypatch):
    """A GPU with flash attention on which a kernel compiles; what the ranks agree on is what this one says."""
    state = {"kernel": "varlen", "lack": None}
    monkeypatch.setattr(device_defaults, "lack", lambda device: state["lack"])
    monkeypatch.setattr(device_defaults, "attention_kernel", lambda config, device: state["kernel"])
    monkeypatch.setattr(device_defaults.distributed, "from_main", lambda value, device: value)
    monkeypatch.setattr(device_defaults.distributed, "reduce_sum", lambda values: values)
    monkeypatch.setattr(device_defaults.torch, "tensor", lambda values, **_: torch.FloatTensor(values))
    return state


def config_in(folder, **train) -> PretrainConfig:
    return PretrainConfig(data="", output=str(folder), model=BertConfig(vocab_size=100), train=TrainConfig(**train))


@pytest.mark.parametrize(
    ("kernel", "stage", "device", "expected"),
    [
        ("varlen", 0, GPU, True),
        ("sdpa", 0, GPU, False),
        ("varlen", 1, GPU, False),
        ("eager", 0, torch.device("cpu"), False),
    ],
)
def test_layers_are_compiled_where_that_is_proven(tmp_path, machine, kernel, stage, device, expected):
    machine["kernel"], told = kernel, Told()
    config = config_in(tmp_path)
    config = replace(config, zero=replace(config.zero, stage=stage))
    assert device_defaults.resolve_compile(config, device, told).train.compile is expected
    assert not told


def test_a_gpu_that_nothing_compiles_for_is_reported(tmp_path, machine):
    machine["lack"], told = Lack("no Python.h", "install python3-dev"), Told()
    assert device_defaults.resolve_compile(config_in(tmp_path), GPU, told).train.compile is False
    assert len(told) == 1 and "no Python.h on this machine; install python3-dev" in told[0]


def test_layers_are_compiled_on_all_ranks_or_on_none(tmp_path, machine, monkeypatch):
    # Another rank has no compiler.
    monkeypatch.setattr(device_defaults.distributed, "reduce_sum", lambda values: values + 1)
    told = Told()
    assert device_defaults.resolve_compile(config_in(tmp_path), GPU, told).train.compile is False
    assert "another process" in told[0]


def test_layers_are_compiled_on_no_rank_if_one_would_not(tmp_path, machine, monkeypatch):
    """Its GPU has no flash attention; it lacks nothing, and nothing is to be installed."""
    other = torch.FloatTensor([1, 0])  # not wanted there, and nothing missing
    monkeypatch.setattr(device_defaults.distributed, "reduce_sum", lambda values: values + other)
    told = Told()
    assert device_defaults.resolve_compile(config_in(tmp_path), GPU, told).train.compile is False and not told


def test_what_was_given_is_what_is_done(tmp_path, machine):
    for given in (True, False):
        runs.keep_device_facts(tmp_path, {"compile": not given})
        assert device_defaults.resolve_compile(config_in(tmp_path, compile=given), GPU, Told()).train.compile is given


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_goes_on_as_it_began(tmp_path, machine, kept):
    """On a GPU whatever it would choose there; not on a CPU, which is not compiled for; again when back on a GPU."""
    runs.keep_device_facts(tmp_path, {"compile": kept})
    runs.keep_device_facts(tmp_path, {"compile": not kept})  # of a later start: the first one counts
    for device, kernel, expected in ((GPU, "sdpa", kept), (torch.device("cpu"), "eager", False), (GPU, "varlen", kept)):
        machine["kernel"] = kernel
        assert device_defaults.resolve_compile(config_in(tmp_path), device, Told()).train.compile is expected


def test_a_run_says_what_differs_from_where_it_began():
    config = config_in("", micro_batch_size=8)
    on_gpu = {"device": "NVIDIA H100", "attention kernel": "varlen", "compile": True, "micro-batch": 8}
    on_cpu = {"device": "cpu", "attention kernel": "eager", "compile": False, "micro-batch": 8}
    assert device_defaults.differences(config, on_gpu, on_gpu) is None
    assert device_defaults.differences(config, {}, on_cpu) is None  # a run of an earlier version
    line = device_defaults.differences(config, on_gpu, on_cpu)
    assert "attention kernel varlen then, eager now" in line and "compile True then, False now" in line
    assert "micro-batch" not in line and "other probabilities" in line and "\n" not in line
    undropped = replace(config, model=replace(config.model, attention_probs_dropout_prob=0.0))
    assert "probabilities" not in device_defaults.differences(undropped, on_gpu, on_cpu)
    assert "dropout drops other units" in device_defaults.differences(config, on_cpu, {**on_cpu, "micro-batch": 4})


def test_facts_are_those_of_the_device_at_hand():
    facts = device_defaults.facts_of(config_in("", micro_batch_size=8, compile=False), torch.device("cpu"))
    assert facts == {"device": facts["device"], "attention kernel": "eager", "compile": False, "micro-batch": 8}
    assert json.loads(json.dumps(facts)) == facts


def test_a_batch_that_is_too_small_for_the_gpus_is_named_with_how_many_it_keeps_busy():
    """BERT-base at 128: 0.66 GFLOP a token."""
    config = config_in("", global_batch_size=256)
    config = replace(config, model=BertConfig.preset("base", vocab_size=100))
    sheet, flops = named_sheet("h100"), 128 * 0.6e9
    assert device_defaults.crowded(config, 1, flops, 110_000_000, sheet) is None
    line = device_defaults.crowded(config, 256, flops, 110_000_000, sheet)
    most = int(re.search(r"up to (\d+) reach half", line)[1])
    assert 4 <= most <= 16 and "found 256 on 256 GPUs" in line
    assert device_defaults.crowded(config, most, flops, 110_000_000, sheet) is None
    assert device_defaults.crowded(config, 2 * most, flops, 110_000_000, sheet) is not None


@pytest.mark.parametrize("form", ["parts", "joined"])
def test_both_forms_of_a_gradient_are_there_for_a_gpu_to_decide(form):
    config = config_in("", qkv_gradients=form)
    model = build_model(replace(config, model=BertConfig.preset("tiny", vocab_size=100)))
    found = [module.joins_gradients for module in model.modules() if isinstance(module, Attention)]
    assert found == [form == "joined"] * 2


def test_fine_tuning_compiles_nothing():
    with pytest.raises(UserError, match="train.compile: found True, expected null"):
        FinetuneConfig(
            model="m",
            task="classification",
            train_file="t",
            validation="v",
            output="o",
            train=TrainConfig(compile=True),
        )
