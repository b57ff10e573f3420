"""`cloze finetune`: trains a pretrained model on a task and writes the model, its metrics and its predictions."""

from functools import partial

from cloze.launch.config import FinetuneConfig
from cloze.launch.finetune import scoring
from cloze.launch.finetune.finetuning_run import open_finetuning
from cloze.launch.finetune.sweep import sweep
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.training.start import train
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import is_url

train_one = partial(train, open_recipe=open_finetuning)


def finetune(config: FinetuneConfig, environment: Environment) -> int:
    """Run or resume a fine-tuning, or one for each seed and setting; returns the exit status. Called by every process
    of the run with the result of `prepare_process`.
    """
    if config.seeds == 1 and not config.grid:
        scoring.check_installed()
        return train_one(config, environment)
    if is_url(config.output):
        raise UserError(
            f"output: found {config.output} with several runs (seeds, grid), expected a folder, where "
            "they are compared; one run by itself goes to an object store"
        )
    if environment.world_size > 1:
        raise UserError(
            f"seeds, grid: found them in a run of {environment.world_size} processes, expected one "
            "process, which starts a run on each GPU; leave torchrun out"
        )
    return sweep(config)
