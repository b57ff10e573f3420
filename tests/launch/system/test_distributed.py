"""How long collectives wait for a rank that does not come, and what they cost a thousand ranks."""

import datetime

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cloze.launch.config import PretrainConfig, TrainConfig, ZeroConfig
from cloze.launch.engine.building import build_deepspeed
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.system import distributed
from cloze.launch.system.environment.launchers import read_environment
from cloze.launch.system.environment.process import prepare_deepspeed
from tests.forked import ForkedRun
from tests.launching import finish


def limits(command: list[str]) -> int:
    """Print how many seconds each group waits; neither gloo's own limit nor NCCL's."""
    environment = read_environment()
    prepare_deepspeed(environment)
    distributed.TIMEOUT = datetime.timedelta(minutes=17)
    device = distributed.initialize(environment, distributed.TIMEOUT)
    config = PretrainConfig("", "", zero=ZeroConfig(stage=2), train=TrainConfig(precision="fp32", learning_rate=1e-4))
    settings = deepspeed_config(config, environment.world_size)
    engine = build_deepspeed(torch.nn.Linear(2, 2), config, settings, device)
    for group in (dist.group.WORLD, engine.data_parallel_group, engine.optimizer.dp_process_group):
        print("waits", group._get_backend(device).options._timeout.total_seconds())
    assert engine.data_parallel_group is not dist.group.WORLD
    return 0


def test_the_groups_of_deepspeed_wait_as_long_as_ours():
    printed = finish(ForkedRun([], main=limits)).splitlines()
    assert [line for line in printed if line.startswith("waits")] == ["waits 1020.0"] * 3


class Count(TorchDispatchMode):
    """Counts the operations of torch."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Count.calls += 1
        return func(*args, **(kwargs or {}))


def gather(command: list[str]) -> int:
    """Gather in a world of 1,024 ranks, by torch's process group that gives each rank's values as this one's."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
    values = torch.arange(12.0, dtype=torch.float64).view(4, 3).t()
    with Count():
        rows = distributed.gather(values)
    assert rows.shape == (1024, 3, 4) and torch.equal(rows[1023], values) and torch.equal(rows[0], values)
    print("operations", Count.calls)
    return 0


def test_a_thousand_ranks_gather_into_one_tensor():
    """In a handful of operations; before, each rank's part was a tensor of its own, at every line of the log."""
    (line,) = (line for line in finish(ForkedRun([], main=gather)).splitlines() if line.startswith("operations"))
    assert int(line.split()[1]) <= 8
