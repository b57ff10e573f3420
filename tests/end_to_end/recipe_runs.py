"""Run recipes at reduced size, all in one process, and print what each live engine was: a line of JSON a recipe."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import yaml

from cloze.launch.commands import parse
from cloze.launch.system.environment.launchers import read_environment
from cloze.launch.system.environment.process import prepare_deepspeed, protect_process


def reduced(config, data: str, output: Path):
    """Two steps of a narrow and shallow model on small batches; everything else stays the recipe's."""
    model = replace(config.model, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    grows = config.train.initial_global_batch_size is not None
    train = replace(
        config.train,
        max_steps=2,
        micro_batch_size=4,
        global_batch_size=8,
        log_every_steps=1,
        initial_global_batch_size=4 if grows else None,
        batch_increment=None,
        batch_warmup_tokens=100 if grows else 0,
    )
    schedule = replace(
        config.schedule,
        warmup_steps=config.schedule.warmup_steps and 1,
        warmup_tokens=config.schedule.warmup_tokens and 100,
    )
    source = config.init_from and str(output / Path(config.init_from).name)  # a phase 1, or teacher, that ran before
    options = config.objective_options | ({"teacher": source} if "teacher" in config.objective_options else {})
    return replace(
        config,
        data=data,
        output=str(output / Path(config.output).name),
        model=model,
        train=train,
        schedule=schedule,
        init_from=source,
        init_layers=config.init_layers and [0, 1],
        objective_options=options,
        evaluation=replace(config.evaluation, samples=4),
    )


def facts_of(engine) -> dict:
    """What the engine is and holds, read off its objects."""
    from cloze.launch.engine.fragments import base_optimizer

    optimizer = base_optimizer(engine._deepspeed)
    kept = (
        "name",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "min_ratio",
        "max_ratio",
        "adapt_undecayed",
    )
    return {
        "optimizer": type(optimizer).__name__,
        "stage": engine.stage,
        "clipping": engine._deepspeed.gradient_clipping() if engine.stage else engine._clipping,
        "products": str(engine.dtype),
        "parameters": sorted({str(p.dtype) for p in engine.model.parameters()}),
        "groups": [{name: group[name] for name in kept if name in group} for group in optimizer.param_groups],
    }


def run_recipes(words: list[str]) -> int:
    """What a process of tests/forked.py does.

    Args:
        words: the output, prepared folders with next-sentence labels, and without them and with masks drawn at load
            time, and the recipes' files.
    """
    protect_process()
    environment = read_environment()
    prepare_deepspeed(environment)
    from cloze.launch.pretrain import command as pretrain_module
    from cloze.launch.system import distributed
    from cloze.launch.training import start

    # DeepSpeed keeps the process group that it saw first: all runs share one.
    device = distributed.initialize(environment)
    distributed.initialize, distributed.shutdown = (lambda environment: device), (lambda: None)
    output, pairs, single = Path(words[0]), words[1], words[2]
    engines = []
    build = start.Engine
    start.Engine = lambda *arguments: engines.append(build(*arguments)) or engines[-1]
    for path in words[3:]:
        whole = parse("pretrain", ["--config", path, "--data", "d", "--output", str(output / Path(path).stem)])
        data = pairs if whole.model.pooler and whole.model.type_vocab_size > 1 else single
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = pretrain_module.pretrain(reduced(whole, data, output), environment)
        print(
            json.dumps(
                {
                    "recipe": path,
                    "status": status,
                    "printed": printed.getvalue(),
                    **facts_of(engines[-1]),
                    "config": yaml.safe_load((output / Path(path).stem / "config.yaml").read_text()),
                }
            ),
            flush=True,
        )
    return 0
