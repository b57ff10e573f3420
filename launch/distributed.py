"""Processes talking to each other: the only file that calls torch.distributed."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from launch.environment import Environment, device_index, device_type

# Long enough for rank 0 to verify or convert a large checkpoint while the others wait.
TIMEOUT = datetime.timedelta(minutes=30)


def initialize(environment: Environment) -> torch.device:
    """Join the process group (nccl on CUDA, gloo elsewhere) and return this rank's device.

    One process alone meets itself in memory, so that no port can collide.
    """
    if device_type() == "cuda":
        device = torch.device("cuda", device_index(environment, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"backend": backend, "rank": environment.rank, "world_size": environment.world_size, "timeout": TIMEOUT}
    if environment.world_size == 1:
        dist.init_process_group(store=dist.HashStore(), **options)
    else:
        # env:// and not an address: torchrun's agent already listens on that port, and only env:// knows it.
        dist.init_process_group(init_method="env://", **options)
    return device


def shutdown() -> None:
    """Leave the process group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of `values` over all ranks, in place; every rank gets it."""
    dist.all_reduce(values)
    return values


def from_main(value: int, device: torch.device) -> int:
    """Rank 0's number on every rank; the others' argument is ignored."""
    box = torch.tensor([value], device=device)
    dist.broadcast(box, src=0)
    return int(box.item())


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def gather(values: torch.Tensor) -> torch.Tensor:
    """`values` (N,) of every rank, (world size, N), on every rank."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)


class HostCopy:
    """Numbers on their way from the device to the host, which does not wait for them: read one step later."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=self._on_gpu)
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self._fresh = False

    def post(self, values: torch.Tensor) -> None:
        """Send float64 (size,) off."""
        self._host.copy_(values, non_blocking=self._on_gpu)
        if self._copied is not None:
            self._copied.record()
        self._fresh = True

    def take(self) -> list[float] | None:
        """What was posted last, or None if that has been taken already."""
        if not self._fresh:
            return None
        self._fresh = False
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
