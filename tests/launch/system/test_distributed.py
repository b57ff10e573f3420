"""How long collectives wait for a rank that does not come."""

import subprocess
import sys

from tests.launching import ROOT

# Neither gloo's own limit nor NCCL's.
LIMITS = """
import datetime
from cloze.launch.system.environment import prepare_deepspeed, read_environment
environment = read_environment()
prepare_deepspeed(environment)
import torch
from cloze.launch.system import distributed
from cloze.launch.config import PretrainConfig, TrainConfig, ZeroConfig
from cloze.launch.engine.building import build_deepspeed; from cloze.launch.engine.config import deepspeed_config

distributed.TIMEOUT = datetime.timedelta(minutes=17)
device = distributed.initialize(environment, distributed.TIMEOUT)
config = PretrainConfig("", "", zero=ZeroConfig(stage=2), train=TrainConfig(precision="fp32", learning_rate=1e-4))
made = deepspeed_config(config, environment.world_size)
engine = build_deepspeed(torch.nn.Linear(2, 2), config, made, device)
for group in (torch.distributed.group.WORLD, engine.data_parallel_group, engine.optimizer.dp_process_group):
    print(group._get_backend(device).options._timeout.total_seconds())
assert engine.data_parallel_group is not torch.distributed.group.WORLD
"""


def test_the_groups_of_deepspeed_wait_as_long_as_ours():
    result = subprocess.run([sys.executable, "-c", LIMITS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(17 * 60.0)] * 3


# Of a world of 1,024 ranks, on torch's process group that gives each rank's values as this one's.
GATHER = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from cloze.launch.system import distributed


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Count.calls += 1
        return func(*args, **(kwargs or {}))


dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
values = torch.arange(12.0, dtype=torch.float64).view(4, 3).t()
with Count():
    rows = distributed.gather(values)
assert rows.shape == (1024, 3, 4) and torch.equal(rows[1023], values) and torch.equal(rows[0], values)
print(Count.calls)
"""


def test_a_thousand_ranks_gather_into_one_tensor():
    """In a handful of operations; before, each rank's part was a tensor of its own, at every line of the log."""
    result = subprocess.run([sys.executable, "-c", GATHER], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) <= 8
