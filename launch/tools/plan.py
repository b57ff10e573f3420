"""`cloze plan`: estimates memory, time and cost of a run without running it."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from cloze.launch.config import BatchArithmetic, MixtureConfig
from cloze.launch.config.training import divisors
from cloze.launch.pretrain.data import open_data
from cloze.launch.pretrain.micro_batch_size import SPARE_SHARE
from cloze.launch.pretrain.schedules import run_masking
from cloze.launch.system.console import Console, Tell, clock, doing
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.memory import GIB
from cloze.launch.tools.planning import assumptions
from cloze.launch.tools.planning.config import PlanConfig
from cloze.launch.tools.planning.estimate import Cluster, Estimator, Lengths, StepEstimate, most_with_half
from cloze.launch.tools.planning.machines import find_machine
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.loading.streams import RunMasking
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.storage import publish_json
from cloze.pipeline.stores.places import to_local

_NO_PRICE = "given by --price_per_hour, the price of one device for an hour"


def plan(config: PlanConfig, environment: Environment) -> None:
    """Print the estimate, and write it as JSON if requested. Runs in one process; `environment` is that of the
    command.
    """
    output = to_local(config.json, "json") if config.json else None
    with doing() as tell:
        figures = _plan_one(config, tell) if len(config.counts) == 1 else _compare(config, tell)
    if output:
        publish_json(output, figures)


def _plan_one(config: PlanConfig, tell: Tell) -> Fields:
    """Print the estimate for one number of GPUs; returns the content of the JSON file."""
    estimator = make_estimator(config, tell=_telling(tell, config.counts[0]))
    stage = config.zero.stage
    step = estimator.step(stage, estimator.micro_batch_size(stage))
    figures = _figures(config, estimator, step) | _stages(estimator)
    _print(config, estimator, step, figures)
    return figures


def _telling(tell: Tell, gpus: int, place: str = "") -> Callable[[str], None]:
    """The function by which an estimator reports what it traces.

    Args:
        place: stands behind the number of GPUs: which of several numbers it is.
    """
    begin = f"tracing the steps on {gpus} GPU{'s' * (gpus > 1)}{place}"
    return lambda text: tell(lambda: f"{begin}: {text}")


def _compare(config: PlanConfig, tell: Tell) -> Fields:
    """Print a table of several numbers of GPUs; returns the content of the JSON file.

    Raises:
        UserError: none of them can run the configuration; the error of the first.
    """
    stage = config.zero.stage
    plans: dict[int, tuple[Estimator, Fields] | UserError] = {}
    known: Estimator | None = None
    for number, gpus in enumerate(config.counts, 1):
        try:
            place = f" (number {number} of {len(config.counts)})"
            known = estimator = make_estimator(config, gpus, known, _telling(tell, gpus, place))
            step = estimator.step(stage, estimator.micro_batch_size(stage))
            plans[gpus] = estimator, _figures(config, estimator, step)
        except UserError as error:
            plans[gpus] = error
    planned = [plan for plan in plans.values() if not isinstance(plan, UserError)]
    if not planned:
        raise next(error for error in plans.values() if isinstance(error, UserError))
    estimator = planned[0][0]
    console, priced = Console(), config.price_per_hour is not None
    console.table(
        f"cloze plan: an estimate, nothing was run: {estimator.cluster.machine.name}, "
        f"{planned[0][1]['tokens'] / 1e9:,.4g} billion tokens",
        (
            "GPUs",
            "sequences of a GPU at once x times a step",
            "memory of a GPU",
            "tokens/s of all GPUs",
            "MFU",
            "MFU, pessimistic",
            "time of the run, h:mm:ss",
            *(["cost of the run, in the price's currency"] if priced else []),
        ),
        [_compared_row(gpus, plan)[: None if priced else -1] for gpus, plan in plans.items()],
    )
    for gpus, plan in plans.items():
        if isinstance(plan, UserError):
            console.say(f"{gpus} GPUs: {plan}")
    limit = _too_small_from(planned[0][0], stage)
    if limit is not None:
        begin = f"from {limit} GPUs on" if limit > 1 else "already on one GPU"
        console.say(
            f"the batch of {config.train.global_batch_size:,} sequences limits the speed {begin}: the memory of a GPU "
            "could hold at least twice its share of the batch at once; to gain more from more GPUs, take a recipe "
            "with a larger batch"
        )
    if not estimator.cluster.machine.is_cpu:
        console.say(f"pessimistic: products at {assumptions.PESSIMISTIC_PRODUCTS:.0%} of the peak")
    if not priced:
        console.say(f"cost: {_NO_PRICE}")
    console.say(_assumed(config, estimator))
    return {
        "estimate": True,
        "batch_too_small_from_gpus": limit,
        "by_gpus": [figures for _, figures in planned],
        "refused": {str(gpus): str(plan) for gpus, plan in plans.items() if isinstance(plan, UserError)},
    }


def _compared_row(gpus: int, planned: tuple[Estimator, Fields] | UserError) -> tuple[str, ...]:
    if isinstance(planned, UserError):
        return (str(gpus), *("-",) * 7)
    figures = planned[1]
    memory = f"{figures['memory_bytes'] / GIB:.1f} GiB"
    return (
        str(gpus),
        f"{figures['micro_batch_size']} x {figures['gradient_accumulation_steps']}",
        memory if figures["fits"] else f"{memory}: does not fit",
        f"{figures['tokens_per_second']:,.0f}",
        f"{figures['mfu']:.1%}",
        f"{figures['pessimistic_mfu']:.1%}",
        clock(figures["hours"] * 3600),
        "" if figures["cost"] is None else f"{figures['cost']:,.0f}",
    )


def _too_small_from(estimator: Estimator, stage: int) -> int | None:
    """The smallest number of GPUs of which each could hold twice its share of a batch; None if a batch of two
    sequences is too much for one.

    Counted without the share of states that more GPUs save at stages 1 to 3, which is little beside activations.
    """
    batch = estimator.config.train.common_size
    counts = divisors(batch)
    place = bisect_left(counts, True, key=lambda gpus: estimator.holds(stage, 2 * batch // gpus))
    return counts[place] if place < len(counts) else None


def make_estimator(
    config: PlanConfig,
    gpus: int | None = None,
    known: Estimator | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Estimator:
    """The Estimator of this run's steps.

    Args:
        gpus: one of the numbers of GPUs; None: the first.
        known: of another number of GPUs, whose model and traces are used again.
        tell: as of Estimator.

    Raises:
        UserError: there are no measurements of this device, or the batch is not a multiple of the processes.
    """
    gpus = config.counts[0] if gpus is None else gpus
    BatchArithmetic.of(config.train, gpus)
    if known:
        return known.changed(tell=tell, cluster=replace(known.cluster, processes=gpus))
    precise = config.train.precision == "fp32"
    machine = find_machine(config.device, torch.float32 if precise else torch.bfloat16)
    if precise and not machine.is_cpu:
        share = assumptions.TF32_PRODUCTS if config.train.tf32 else assumptions.FP32_PRODUCTS
        machine = replace(machine, best_product=machine.best_product * share)
    if config.link_gigabytes is not None:
        machine = replace(machine, link=config.link_gigabytes * 1e9)
    config, lengths = _lengths(config)
    model = config.model
    if not model.vocab_size:
        size = Manifest.load(config.sources[0].path).vocab_size if config.data else assumptions.VOCAB_SIZE
        model = replace(model, vocab_size=size)
    cluster = Cluster(machine, gpus, config.gpus_per_machine, config.network_gigabytes * 1e9)
    return Estimator(replace(config, model=model), lengths, cluster, tell)


def _lengths(config: PlanConfig) -> tuple[PlanConfig, Lengths]:
    """The configuration with the steps that config.tokens makes, and the run's lengths."""
    found = _masked_lengths(config)
    if config.tokens is not None:
        steps = math.ceil(config.tokens / (config.train.global_batch_size * found.mean))
        config = replace(config, train=replace(config.train, max_steps=steps))
    tokens = config.train.max_steps * config.train.global_batch_size * found.mean
    kinds = RunMasking(next_tokens_until=config.masking.next_tokens_until, causal_share=config.train.causal_part)
    return config, replace(found, next_tokens=kinds.mean_causal_share(round(tokens)))  # in tokens, as the option


def _masked_lengths(config: PlanConfig) -> Lengths:
    if isinstance(config.data, MixtureConfig):
        data, _ = open_data(config)
        return Lengths(tuple(data.length_histogram.tolist()), data.most_masked(run_masking(config, data)))
    if config.data:
        manifest = Manifest.load(config.data)
        return Lengths(tuple(manifest.splits["train"].length_histogram), manifest.masked_share)
    assert config.train.sequence_length is not None, "PlanConfig asks for it"
    return Lengths.of_procedure(config.train.sequence_length, config.short_share, config.masked_share)


def _figures(config: PlanConfig, estimator: Estimator, step: StepEstimate) -> Fields:
    """Content of the JSON file."""
    machine, gpus = estimator.cluster.machine, estimator.cluster.processes
    memory = estimator.memory(config.zero.stage, step.batch.micro_batch_size)
    seconds = estimator.seconds_of_run(step)
    hours = seconds / 3600
    weights = estimator.parameters
    return {
        "estimate": True,
        "device": machine.name,
        "gpus": gpus,
        "fits": estimator.fits(memory),
        "memory_bytes": memory.total,
        "memory_by_kind": asdict(memory),
        "device_memory_bytes": estimator.limit,
        "parameters": weights,
        "micro_batch_size": step.batch.micro_batch_size,
        "largest_micro_batch_size": estimator.largest_micro_batch(config.zero.stage),
        "gradient_accumulation_steps": step.batch.gradient_accumulation_steps,
        "launches_per_micro_step": step.micro.launches,
        "micro_step_seconds": step.micro.seconds,
        "micro_step_device_seconds": step.micro.device_seconds,
        "micro_step_host_seconds": step.micro.host_seconds,
        "device_seconds_by_kind": step.micro.by_kind,
        "optimizer_seconds": step.optimizer.seconds,
        "gradient_seconds": step.gradient_seconds,
        "communication_seconds": step.communication_seconds,
        "communication_waiting_seconds": step.waiting_seconds,
        "step_seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.flops / step.seconds / (machine.flops * gpus),
        "pessimistic_mfu": estimator.pessimistic().mfu(config.zero.stage, step.batch.micro_batch_size),
        "hours": hours,
        "steps": round(seconds / step.seconds),
        "tokens": step.tokens * seconds / step.seconds,
        "checkpoint_bytes": estimator.checkpoint_bytes(config.zero.stage),
        "data_bytes_per_second": step.tokens_per_second * assumptions.SHARD_BYTES_A_TOKEN,
        "cost": None if config.price_per_hour is None else config.price_per_hour * gpus * hours,
        "communication_share": step.communication_seconds / step.seconds,
    }


def _stages(estimator: Estimator) -> Fields:
    """The ZeRO stages beside each other, and the fastest."""
    stages = {stage: _stage(estimator, stage) for stage in estimator.stages()}
    fastest = max(stages, key=lambda stage: stages[stage].get("tokens_per_second", 0.0))
    return {"stages": stages, "fastest_stage": fastest}


def _stage(estimator: Estimator, stage: int) -> Fields:
    """A ZeRO stage with its largest micro-batch."""
    size = estimator.largest_micro_batch(stage)
    if size is None:
        return {"fits": False, "memory_bytes": estimator.memory(stage, 1).total}
    step = estimator.step(stage, size)
    return {
        "fits": True,
        "memory_bytes": estimator.memory(stage, size).total,
        "micro_batch_size": size,
        "communication_seconds": step.communication_seconds,
        "communication_waiting_seconds": step.waiting_seconds,
        "tokens_per_second": step.tokens_per_second,
    }


def _print(config: PlanConfig, estimator: Estimator, step: StepEstimate, figures: Fields) -> None:
    console = Console()
    console.facts(
        "cloze plan: an estimate, nothing was run",
        [*_memory_rows(estimator, step, figures), *_time_rows(config, step, figures)],
    )
    console.table(
        "ZeRO stages, each with its largest micro-batch",
        ("stage", "memory", "micro-batch", "communication", "not hidden", "tokens/s"),
        [_stage_row(*each) for each in figures["stages"].items()],
    )
    for advice in (_advice(config.zero.stage, figures), _limited_by_batch(config, estimator, figures)):
        if advice:
            console.say(advice)
    console.say(_assumed(config, estimator))


def _memory_rows(estimator: Estimator, step: StepEstimate, figures: Fields) -> list[tuple[str, str]]:
    machine, largest = estimator.cluster.machine, figures["largest_micro_batch_size"]
    kinds = ", ".join(f"{name} {value / GIB:.1f}" for name, value in figures["memory_by_kind"].items())
    return [
        (
            "device",
            f"{figures['gpus']} x {machine.name}: {machine.flops / 1e12:,.3g} TFLOP/s dense, "
            f"{estimator.limit / 1e9:.0f} GB ({machine.origin})",
        ),
        ("model", f"{estimator.parameters:,} parameters"),
        ("batch", str(step.batch)),
        (
            "fits",
            f"{'yes' if figures['fits'] else 'NO'}: {figures['memory_bytes'] / GIB:.1f} GiB of "
            f"{estimator.limit / GIB:.1f}, of which {SPARE_SHARE:.0%} stay free: {kinds}",
        ),
        (
            "largest micro-batch",
            "none" if largest is None else f"{largest} sequences of {estimator.lengths.longest} tokens",
        ),
    ]


def _time_rows(config: PlanConfig, step: StepEstimate, figures: Fields) -> list[tuple[str, str]]:
    micro, gpus = step.micro, figures["gpus"]
    parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in micro.by_kind.items())
    waits = "the device waits for it" if micro.host_seconds > micro.device_seconds else "hidden behind the device"
    reading = step.tokens_per_second / gpus / assumptions.TOKENS_A_SECOND_OF_A_READER
    rows = [
        ("device time", f"{micro.device_seconds * 1e3:.1f} ms a micro-step: {parts}"),
        ("launches", f"{micro.launches:,} a micro-step, {micro.host_seconds * 1e3:.1f} ms of the host: {waits}"),
        (
            "optimizer",
            f"{step.optimizer.seconds * 1e3:.1f} ms a step, and {step.gradient_seconds * 1e3:.1f} ms for "
            "passes over gradients and copies of weights",
        ),
        ("communication", f"{step.communication_seconds * 1e3:.1f} ms a step, {_hidden(step)}"),
        (
            "besides",
            f"{step.straggling_seconds * 1e3:.1f} ms for the rank with most tokens, {step.hooks_seconds * 1e3:.1f} ms "
            "for hooks, the exchange of counts and inspected steps",
        ),
        ("step", f"{step.seconds:.3g} s for {step.tokens:,.0f} tokens"),
        (
            "speed",
            f"{step.tokens_per_second:,.0f} tokens/s, {step.tokens_per_second / gpus:,.0f} a device; MFU "
            f"{figures['mfu']:.1%}; pessimistic, with products at {assumptions.PESSIMISTIC_PRODUCTS:.0%} of the peak, "
            f"{figures['pessimistic_mfu']:.1%}",
        ),
        (
            "run",
            f"{clock(figures['hours'] * 3600)} hours for {figures['steps']:,} steps, "
            f"{figures['tokens'] / 1e9:,.3g} billion tokens",
        ),
        ("checkpoint", f"{figures['checkpoint_bytes'] / 1e9:.2f} GB each, {config.checkpoint.keep_last} kept"),
        (
            "data",
            f"{figures['data_bytes_per_second'] / 1e6:,.1f} MB/s of shards in all, {reading:.1%} of a core for "
            "each process",
        ),
    ]
    cost = figures["cost"]
    priced = "" if cost is None else f"{cost:,.0f} at {config.price_per_hour:g} a device and hour"
    return [*rows, ("cost", priced or _NO_PRICE)]


def _hidden(step: StepEstimate) -> str:
    """How much of the communication makes the step longer."""
    share = f"{step.waiting_seconds / step.seconds:.0%} of it"
    if step.waiting_seconds == step.communication_seconds:
        return f"{share}, none of it hidden"
    return f"which makes it {step.waiting_seconds * 1e3:.1f} ms longer ({share}); the rest overlaps with backward"


def _stage_row(stage: int, figures: Fields) -> tuple[str, ...]:
    memory = f"{figures['memory_bytes'] / GIB:.1f} GiB"
    if not figures["fits"]:
        return (str(stage), memory, "none fits", "", "", "")
    return (
        str(stage),
        memory,
        str(figures["micro_batch_size"]),
        f"{figures['communication_seconds'] * 1e3:.1f} ms",
        f"{figures['communication_waiting_seconds'] * 1e3:.1f} ms",
        f"{figures['tokens_per_second']:,.0f}",
    )


# A stage is recommended only if it is faster by more than this share, the accuracy of the estimate.
_WORTH = 1.05


def _advice(stage: int, figures: Fields) -> str | None:
    """Advice if another ZeRO stage is faster, as at large world sizes, where at stage 0 each device updates all
    weights; else None.
    """
    stages, fastest = figures["stages"], figures["fastest_stage"]
    rates = {number: found.get("tokens_per_second", 0.0) for number, found in stages.items()}
    if stage not in rates or rates[fastest] < _WORTH * rates[stage]:
        return None
    if not rates[stage]:
        return f"fits: --zero.stage {fastest}, unlike stage {stage}"
    return (
        f"faster: --zero.stage {fastest} --train.micro_batch_size {stages[fastest]['micro_batch_size']}: "
        f"{rates[fastest] / rates[stage] - 1:.0%} more tokens/s than stage {stage}"
    )


def _limited_by_batch(config: PlanConfig, estimator: Estimator, figures: Fields) -> str | None:
    """A line if the largest micro-batch is a device's whole share of the batch although a larger one would fit; else
    None.
    """
    gpus, stage = estimator.cluster.processes, config.zero.stage
    share = config.train.common_size // gpus
    reached = gpus > 1 and figures["largest_micro_batch_size"] == share
    if not reached or not estimator.holds(stage, 2 * share):
        return None
    return (
        f"limited by the batch, not by memory: it gives each of {gpus} devices {share} "
        f"sequence{'s' * (share > 1)}; up to {most_with_half(estimator, stage)} devices reach half of the MFU of one: "
        "take fewer, or a recipe with a larger batch"
    )


def _assumed(config: PlanConfig, estimator: Estimator) -> str:
    """The assumptions of the estimate in one paragraph."""
    machine, lengths = estimator.cluster.machine, estimator.lengths
    said = [
        f"products at most {machine.best_product:.0%} of the peak",
        f"memory at {machine.bandwidth / 1e9:,.0f} GB/s",
    ]
    if not machine.is_cpu:
        said += [
            f"{assumptions.HOST_SECONDS * 1e6:.0f} µs of the host a launch "
            f"({assumptions.COMPILED_HOST_SECONDS * 1e6:.0f} compiled)"
        ]
    if max(config.counts) > 1:
        said += [
            f"links at {assumptions.COLLECTIVE:.0%} of {machine.link / 1e9:.0f} GB/s inside a machine and of "
            f"{config.network_gigabytes:g} GB/s between machines"
        ]
    folders = ", ".join(each.path for each in config.sources)
    source = folders if config.data else f"{config.short_share:.0%} of them shorter"
    said += [
        f"{lengths.mean:.0f} tokens a sequence ({source}), {lengths.masked_share:.0%} of them masked",
        "the full batch from the first step",
        "no evaluation, no wait for data or checkpoints",
    ]
    return (
        f"assumed: {'; '.join(said)}. Constants and their sources: launch/tools/planning/assumptions.py; how well "
        "they predict published rates: docs/scaling.md"
    )
