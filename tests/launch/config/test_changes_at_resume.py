"""Which fields a run may go on with another value of: said where a field is declared."""

from dataclasses import dataclass, field

from cloze.launch.config import FinetuneConfig, PretrainConfig
from cloze.launch.config.changes_at_resume import FIXED, FREE, marked


@dataclass(frozen=True)
class Inner:
    how: int = field(default=1, metadata=FREE)
    what: int = 2
    shape: int = field(default=3, metadata=FIXED)


@dataclass(frozen=True)
class Outer:
    where: str = field(metadata=FREE)
    inner: Inner = field(default_factory=Inner)
    whole: Inner = field(default_factory=Inner, metadata=FREE)


def test_marks_are_found_in_sections_and_a_whole_section_is_one():
    assert marked(Outer, FREE) == ["where", "inner.how", "whole."] and marked(Outer, FIXED) == ["inner.shape"]


def test_both_kinds_of_runs_let_the_same_fields_of_training_change():
    """FinetuneTrainConfig declares some of TrainConfig's fields anew: a mark must not be lost there."""
    pretraining, finetuning = (
        {name for name in marked(kind, FREE) if name.startswith("train.")} for kind in (PretrainConfig, FinetuneConfig)
    )
    assert pretraining == finetuning >= {"train.micro_batch_size", "train.log_every_steps"}
    assert "train.learning_rate" not in pretraining and "model." in marked(PretrainConfig, FIXED)
