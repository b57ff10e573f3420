"""The GPU of a process, and what says that there is one."""

import errno
import os

import pytest
import torch

from cloze.launch.system.environment import gpus
from cloze.launch.system.environment.gpus import device_index, device_type, gpu_sign
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError


@pytest.fixture
def devices(tmp_path):
    """A folder like /dev, of a machine with one GPU."""
    for name in ("nvidia0", "nvidiactl", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_gpus_that_the_job_or_the_machine_has(devices, tmp_path, monkeypatch):
    """Variables come before devices, and no GPU is expected where the user or Slurm hides them."""
    assert gpu_sign({}, devices) == str(devices / "nvidia0")
    assert gpu_sign({}, tmp_path / "none") is None
    assert gpu_sign({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path / "none") == "CUDA_VISIBLE_DEVICES=2,3"
    assert gpu_sign({"SLURM_GPUS_ON_NODE": "8"}, tmp_path / "none") == "SLURM_GPUS_ON_NODE=8"
    for hidden in ("", "-1", "NoDevFiles"):
        assert gpu_sign({"CUDA_VISIBLE_DEVICES": hidden, "SLURM_GPUS_ON_NODE": "8"}, devices) is None

    def refuse(number):
        def opened(path, flags):
            raise OSError(number, os.strerror(number))

        return opened

    monkeypatch.setattr(gpus.os, "open", refuse(errno.EPERM))
    assert gpu_sign({}, devices) is None, "control groups give the GPU to another job"
    monkeypatch.setattr(gpus.os, "open", refuse(errno.EIO))
    assert gpu_sign({}, devices) == str(devices / "nvidia0"), "a GPU that is broken is one"


def test_a_driver_too_old_is_an_error_and_no_run_on_the_cpu(monkeypatch):
    """A build with CUDA that finds no GPU where the job has some; DS_ACCELERATOR=cpu says that the CPU is meant."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device_type() == "cpu", "a build for the CPU was installed on purpose"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpus, "_driver", lambda: "535.104.05")
    with pytest.raises(UserError, match=r"^CUDA_VISIBLE_DEVICES=0: .*driver 535\.104\.05.*CUDA 13\.0 needs \(580"):
        device_type()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert device_type() == "cpu"


def test_each_process_has_a_gpu_of_its_own():
    assert device_index(Environment(rank=5, local_rank=1, world_size=8, launcher="torchrun"), 4) == 1
    assert device_index(Environment(rank=3, local_rank=3, world_size=8, launcher="slurm"), 1) == 0
    with pytest.raises(UserError, match="found 1 GPUs on this machine"):
        device_index(Environment(rank=1, local_rank=1, world_size=2, launcher="torchrun"), 1)
