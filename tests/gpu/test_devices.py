"""What a process settles before its first step on a GPU, and how a batch gets there."""

from __future__ import annotations

import os

import pytest
import torch

from cloze.launch.config import PretrainConfig, TrainConfig
from cloze.launch.system import devices, distributed
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.environment.process import record_collectives
from cloze.pipeline.errors import UserError

GPU = torch.device("cuda", 0)


def test_a_packed_batch_is_the_batch_again():
    """Of dtypes, sizes and strides that do not follow from each other, an empty one and a number among them."""
    batch = {
        "offsets": torch.tensor([0, 3, 8], dtype=torch.int32),
        "mask": torch.tensor([True, False, True]),
        "longest": 5,
        "ids": torch.arange(7),
        "none": torch.empty(0, dtype=torch.long),
        "values": torch.randn(3, 5)[:, ::2],
        "one": torch.tensor(2.5, dtype=torch.float64),
        "first": torch.arange(1)[::2],  # a stride of 2
    }
    packed, places = devices.packed_bytes(batch)
    assert packed.dtype == torch.uint8 and places.keys() == batch.keys() - {"longest"}
    for name, (start, tensor) in places.items():
        assert start % 16 == 0
        found = packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        assert torch.equal(found, batch[name]) and found.dtype == batch[name].dtype


@pytest.fixture
def numerics():
    """What a test changes for the whole process is put back."""
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    yield
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize("chosen", [True, False])
def test_kernels_are_chosen_on_a_gpu_alone(numerics, chosen):
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    devices.choose_kernels(torch.device("cpu"), tf32=True, deterministic=True)
    assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == before
    devices.choose_kernels(GPU, tf32=chosen, deterministic=chosen)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled() != chosen and torch.backends.cuda.math_sdp_enabled()
    assert torch.get_float32_matmul_precision() == ("high" if chosen else "highest")
    assert torch.are_deterministic_algorithms_enabled() == chosen


def test_tf32_is_for_fp32():
    assert PretrainConfig(data="", output="", train=TrainConfig(precision="fp32", tf32=True)).train.tf32
    with pytest.raises(UserError, match="train.tf32: found true with train.precision bf16"):
        TrainConfig(tf32=True)


def test_nccl_gets_the_device_of_each_rank(monkeypatch):
    given = {}
    monkeypatch.setattr(distributed, "device_type", lambda: "cuda")
    monkeypatch.setattr(distributed, "work_on", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda **options: given.update(options))
    environment = Environment(rank=11, local_rank=3, world_size=16, launcher="torchrun")
    assert distributed.initialize(environment) == given["device_id"] == torch.device("cuda", 3)
    assert given["backend"] == "nccl"


def test_nccl_writes_its_last_collectives_into_the_run_unless_the_user_has_said_where(monkeypatch, tmp_path):
    """And how many, by either of torch's names."""
    for name in (
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ):
        monkeypatch.setenv(name, "")  # which is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    record_collectives(tmp_path / "rank-")
    assert {
        name: os.environ.get(name)
        for name in (
            "TORCH_FR_BUFFER_SIZE",
            "TORCH_NCCL_TRACE_BUFFER_SIZE",
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
            "TORCH_FR_DUMP_TEMP_FILE",
        )
    } == {
        "TORCH_FR_BUFFER_SIZE": None,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank-"),
    }
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "mine")
    record_collectives(tmp_path / "rank-")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "mine"


@pytest.mark.parametrize(
    ("capability", "installed", "dropout", "taken"),
    [
        ((9, 0), True, 0.0, True),
        ((9, 0), True, 0.1, False),
        ((8, 0), True, 0.0, False),
        ((10, 0), True, 0.0, False),
        ((9, 0), False, 0.0, False),
    ],
)
def test_flash_attention_3_computes_where_it_is_installed_and_can(monkeypatch, capability, installed, dropout, taken):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", asked.append)
    assert devices.take_flash_attention_3(GPU, dropout) is None
    assert asked == (["FA3"] if taken else []) and "FA3" in torch.nn.attention.list_flash_attention_impls()


def test_a_broken_flash_attention_3_is_reported(monkeypatch, tmp_path):
    """By torch's own activation: a module of that name without its kernels."""
    (tmp_path / "flash_attn_interface.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "does not expose FA3 forward kernels" in devices.take_flash_attention_3(GPU, 0.0)
    assert not devices.has_flash_attention_3()
