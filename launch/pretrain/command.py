"""`cloze pretrain`: trains on prepared shards, writes checkpoints and curves; `cloze deepspeed-config`."""

import json
from functools import partial

from cloze.launch.config import DeepSpeedConfig
from cloze.launch.config.training import AUTO
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.pretrain.pretraining_run import open_pretraining
from cloze.launch.system.console import Console
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.training.start import train

pretrain = partial(train, open_recipe=open_pretraining)


def print_deepspeed_config(config: DeepSpeedConfig, environment: Environment) -> None:
    """Print DeepSpeed's configuration for a run as JSON; nothing is started."""
    if config.train.micro_batch_size in (AUTO, None):
        Console().warn(
            f"train.micro_batch_size: found {config.train.micro_batch_size or 'null'}, which a run finds "
            "out on its device; the numbers of sequences and of accumulation steps below stand in for it"
        )
    print(json.dumps(deepspeed_config(config, config.processes), indent=1))
