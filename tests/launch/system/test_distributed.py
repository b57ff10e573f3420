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
