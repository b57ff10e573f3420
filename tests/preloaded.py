"""What the process imports from which tests fork theirs (forked.py), so that none of them has to: what the commands
import before and while they run, and the parsers of those that run most, with what these find once.
"""

import importlib

import pytest  # noqa: F401

import tests.forked  # noqa: F401
from cloze.launch.commands import parse
from cloze.launch.system.environment.process import fewer_imports

LATER = (
    "matplotlib.backends.backend_agg",  # which draws the confusions of a fine-tuning
    # What DeepSpeed imports when it makes an engine, TensorBoard's writer with a run's settings, and a console's table.
    "deepspeed.module_inject.auto_ep_layer",
    "rich._emoji_codes",
    "tensorboard.plugins.hparams.plugin_data_pb2",
    "cloze.launch.pretrain.command",
    "cloze.launch.finetune.command",
    "cloze.launch.serve.app",
)

with fewer_imports():  # mlflow alone would take a quarter of the time
    from cloze.launch.engine.repairs import import_muon_without_compiler

    for module in LATER:
        importlib.import_module(module)
    import_muon_without_compiler()
for words in (
    "pretrain --data d --output o",
    "finetune sst2 --model m --train t --validation v --output o",
    "serve m",
):
    parse(words.split()[0], words.split()[1:])
