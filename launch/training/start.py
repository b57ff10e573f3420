"""The way of every training run: open, join, build, resume, train, end."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from cloze.launch.checkpoint.complete_check import saved_facts
from cloze.launch.config import RunConfig
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.engine.engine import Engine
from cloze.launch.run import runs
from cloze.launch.run.description import write_description
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.preemption import StopRequest
from cloze.launch.run.resume_check import run_hash
from cloze.launch.run.stored_run import open_stored_run
from cloze.launch.system.console import Console
from cloze.launch.system.devices import peak_flops
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.exit_status import EXIT_COMPLETE, EXIT_REQUEUE
from cloze.launch.training.callbacks import Callback, StopOnRequest
from cloze.launch.training.curves import Curves
from cloze.launch.training.evaluation import Evaluations
from cloze.launch.training.inspection import Inspector, StepProfiler
from cloze.launch.training.loop import Loop
from cloze.launch.training.metric_sums import MetricWindow
from cloze.launch.training.process import Process, joined, recorded
from cloze.launch.training.recipe import Recipe
from cloze.launch.training.resuming import open_checkpoints, resume
from cloze.launch.training.saving import Publishing, Saving
from cloze.launch.training.skipped_steps import TrainProgress
from cloze.launch.training.throughput import SlowRanks, Throughput, Utilization
from cloze.launch.training.weight_average import WeightAverage
from cloze.pipeline.fields import Fields

Kind = TypeVar("Kind", bound=RunConfig)
OpenRecipe = Callable[[Kind, Environment, Console], AbstractContextManager[Recipe]]


def train(config: Kind, environment: Environment, *, open_recipe: OpenRecipe[Kind]) -> int:
    """Run or resume a training, in each process after `prepare_process`; returns the exit status.

    Args:
        open_recipe: reads the inputs of the run and checks them; nothing is written.

    Raises:
        UserError: the configuration is wrong or does not fit the inputs, the folder holds another run, or the training
            has failed.
    """
    console = Console(environment.is_main)
    # The run in a store, if the output is one; the configuration then has a local folder.
    with (
        open_stored_run(config, environment, console) as (local, stored),
        open_recipe(local, environment, console) as recipe,
    ):
        deepspeed_config(recipe.config, environment.world_size)  # its errors, before anything is written
        with joined(recipe.config, recipe.facts, environment, console, stored) as (process, stop):
            training = Training(recipe, process)
            with (
                recorded(
                    recipe.config, training.progress, process, stop, training.kept, training.checkpoints
                ) as record,
                recipe.open_stream(training.progress.state, process) as stream,
            ):
                loop = training.loop(record.metrics, stop)
                record.complete = loop.run(stream) and record.last(partial(recipe.finish, loop, process, stop))
        if record.complete:
            for line in recipe.last_lines(process):
                console.say(line)
            if stored:
                stored.clear()
    return EXIT_COMPLETE if record.complete else EXIT_REQUEUE


class Training:
    """The parts of a run, built, and resumed from its newest checkpoint if there is one. Collective.

    Args:
        recipe: of the run, with its inputs open.

    Raises:
        UserError: as `open_checkpoints`, `Engine` and the methods of the recipe.
    """

    def __init__(self, recipe: Recipe, process: Process) -> None:
        self.recipe, self.process = recipe, process
        self.checkpoints, step, elastic = open_checkpoints(recipe.config, recipe.facts, process)
        recipe.open(process, self.checkpoints, step)  # before the choices, which may try sizes for minutes
        recipe.choose_by_device(process)
        process.console.say("building the model and DeepSpeed's engine")  # which may take long
        model = recipe.build_model(process, self.checkpoints, step)
        config = recipe.config
        torch.manual_seed(config.seed)  # our code does not use the global generator; seeded for libraries that do
        settings = deepspeed_config(
            config, process.environment.world_size, load_universal=elastic or recipe.needs_conversion
        )
        self.engine = Engine(model, config, settings, process.device)
        process.console.facts(*recipe.table(process, self.engine))
        sources = recipe.sources.num_sums if recipe.sources else 0
        self.progress = TrainProgress(
            MetricWindow(len(recipe.objective.NAMES), sources, process.device),
            most_skipped=config.train.max_skipped_steps,
            keeps_skipped=self.engine.scales_loss,
            warn=process.console.warn,
        )
        ema, steps, rank = recipe.ema, config.train.max_steps, process.environment.rank
        self.average = WeightAverage(self.engine, ema, steps, rank) if ema.wanted else None
        if step is None:
            self.progress.state = recipe.first_state(self.engine, process)
        else:
            resume(step, self.checkpoints, self.engine, self.progress, self.average, process, config, recipe.facts)
            process.console.say(f"resumed from step {step} of {config.train.max_steps}")
        self.kept: Fields = {} if step is None else self.checkpoints.state(step)
        """The content of state.json of the checkpoint that the run goes on from."""
        self.run: str | None = self.kept.get(runs.RUN) if self.kept else run_hash(config, recipe.first_weights)
        """Which run this is; None: an earlier version has begun it."""
        self.measure = recipe.make_evaluation(self.engine, process, step is not None)
        if process.environment.is_main:
            folder, shown, first = Path(config.output), process.shown(config), recipe.first_weights
            saves = {runs.ORIGIN: recipe.save_origin, runs.TOKENIZER: recipe.save_tokenizer}
            write_description(folder, shown, recipe.facts, saves, settings, self.run, first, begins=step is None)

    def loop(self, metrics: MetricsWriter | None, stop: StopRequest) -> Loop:
        """The loop with all that watches it, in this order after a step and in reverse order at the end. Each line says
        what a watcher may decide; all ranks decide alike, by numbers that are the same on all.

        Args:
            metrics: rank 0's writer, from the run's step on; None elsewhere.
        """
        recipe, process, engine, progress, average = self.recipe, self.process, self.engine, self.progress, self.average
        config, console, environment = recipe.config, process.console, process.environment
        throughput = Throughput(process.device, peak_flops(process.device, engine.dtype), process.heartbeat)
        watchers: list[Callback] = []
        curves = Curves(config, recipe.objective, recipe.sources, progress, throughput, console, metrics, watchers)
        profiler = StepProfiler(Path(config.output), config.monitor.profile_steps, environment.rank, process.device)
        facts = {
            "zero_stage": self.engine.stage,
            "sharding_stage": self.engine.sharding_stage,
            runs.RUN: self.run,
            **saved_facts(config, recipe.facts),
            **recipe.facts,
            **recipe.kept_facts(),
        }
        saving = Saving(config, engine, self.checkpoints, progress, throughput, facts, metrics, average, console.warn)
        watchers += [
            StopOnRequest(stop),  # a stop, by a wish
            Publishing(self.checkpoints, throughput),  # when a checkpoint is published: once all ranks have written
            *([average] if average else []),
            profiler,
            Inspector(engine, config, environment.world_size, curves, profiler),
            Utilization(throughput, process.device, engine.dtype, console),
            SlowRanks(config, throughput, console),
            *recipe.callbacks,  # a stop and a save, by wishes; the best checkpoint, by rank 0's `evaluation.metric`
            curves,
        ]
        if self.measure:
            show = recipe.make_show(engine, metrics)
            evaluations = Evaluations(config, self.measure, show, average, progress, throughput, curves, watchers)
            watchers.append(evaluations)  # the best checkpoint, and the end by patience or target
        watchers.append(saving)  # when a checkpoint is saved
        loop = Loop(
            config,
            engine,
            recipe.objective,
            recipe.sources,
            recipe.flops,
            progress,
            self.checkpoints,
            watchers,
            saving.give_up,
            throughput,
            environment,
        )
        if not loop.completion:  # what comes next may take minutes without a word
            first = "an evaluation first, then " if progress.state.step == 0 and self.measure else ""
            every = "step" if config.train.log_every_steps == 1 else f"{config.train.log_every_steps} steps"
            console.say(f"training from step {progress.state.step}: {first}a line every {every}")
        return loop
