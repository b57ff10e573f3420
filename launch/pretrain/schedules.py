"""What changes with the samples of a pretraining run: the size of its global batches, and what it masks."""

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.data import TrainingData
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import BatchPhases, growing_batches
from cloze.pipeline.loading.streams import RunMasking
from cloze.pipeline.samples.masking import RatePhases, RateSchedule


def run_masking(config: PretrainConfig, data: TrainingData) -> RunMasking:
    """What the run predicts when: masking rates, for masks that are drawn at load time, and next tokens.

    Raises:
        UserError: rates are given although the shards hold their masks, or all of the run would have next tokens.
    """
    chosen = config.masking
    given = {
        "rate": chosen.rate,
        "phases": chosen.phases and f"rates {[phase.rate for phase in chosen.phases]}",
        "strategy": chosen.strategy,
    }
    for name, value in given.items():
        stored = next((manifest.folder for manifest in data.manifests if manifest.mask_sets), None)
        if value and stored:
            raise UserError(
                f"masking.{name}: found {value} with shards in {stored} that hold their masks, expected "
                "none; or prepare them with --masking.mode dynamic"
            )
    end = samples_of_run(config, data)
    rate: RateSchedule | RatePhases | None = None
    if chosen.phases:
        ends = [
            data.position(phase.until_tokens or 0) if phase.until_share is None else round(phase.until_share * end)
            for phase in chosen.phases[:-1]
        ]  # each phase has one of the two: PretrainMaskingConfig
        rate = RatePhases(tuple(phase.rate for phase in chosen.phases), tuple(ends))
    elif chosen.rate is not None:
        rate = RateSchedule(chosen.rate, chosen.final_rate or chosen.rate, round(chosen.change_begins * end), end)
    until = data.position(chosen.next_tokens_until) if chosen.next_tokens_until else 0  # a folder may be empty
    if until >= end:
        raise UserError(
            f"masking.next_tokens_until: found {chosen.next_tokens_until:,}, expected less than the "
            f"{data.mean_length * end:,.0f} tokens of the run; masked ones follow"
        )
    return RunMasking(rate, chosen.strategy, until, config.train.causal_part)


def samples_of_run(config: PretrainConfig, data: TrainingData) -> int:
    """Samples of `train.max_steps` global batches."""
    steps, final, warmup = config.train.max_steps, config.train.global_batch_size, batch_warmup(config, data)
    return warmup.samples(steps, final) if warmup else steps * final


def batch_warmup(config: PretrainConfig, data: TrainingData) -> BatchPhases | None:
    """How the size of global batches changes with the tokens seen, which are computed from the mean length of a sample,
    so that all ranks know the size of every batch without communication.
    """
    train = config.train
    if train.batch_phases:
        return BatchPhases(
            tuple(phase.global_batch_size for phase in train.batch_phases),
            tuple(data.position(phase.until_tokens) for phase in train.batch_phases),
        )
    if train.initial_global_batch_size is None or train.increment is None:
        return None
    return growing_batches(
        train.initial_global_batch_size,
        train.increment,
        data.position(train.batch_warmup_tokens),
        train.global_batch_size,
    )
