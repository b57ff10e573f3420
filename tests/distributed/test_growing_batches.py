"""Global batches whose size changes with the tokens: the same for any number of processes, and exact through a
resume.
"""

import json

import pytest

from cloze.launch.cli import main
from cloze.pipeline.shards.reader import ShardReader
from tests.forked import ForkedRun
from tests.launching import (
    NO_DROPOUT,
    assert_killed_equals_whole,
    assert_same_weights,
    curve,
    finish,
    kill_at,
    pretrain_arguments,
    resume,
    train,
    weights,
)
from tests.synthetic import make_shards

RUN = (
    "--train.max_steps",
    "30",
    "--checkpoint.every_steps",
    "4",
    "--train.initial_global_batch_size",
    "8",
    "--train.global_batch_size",
    "32",
    "--train.batch_warmup_tokens",
    "5000",
    "--schedule.warmup_tokens",
    "2000",
    "--schedule.name",
    "wsd",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("growing"))


def samples(run) -> list[int]:
    """Samples of each step."""
    counted = [0, *(line["data/samples"] for line in curve(run) if "data/samples" in line)]
    return [after - before for before, after in zip(counted, counted[1:], strict=False)]


@pytest.mark.slow
def test_one_process_and_two_see_the_same_batches(data, tmp_path):
    """At stage 3, since sizes come before the engine; the next test is of stage 0."""
    for processes, micro in ((1, 8), (2, 4)):
        output = train(
            data,
            tmp_path / str(processes),
            *RUN,
            *NO_DROPOUT,
            "--train.micro_batch_size",
            str(micro),
            "--zero.stage",
            "3",
            processes=processes,
        )
        assert "grows from 8 by 8 over the first 5,000 tokens" in " ".join(output.replace("│", " ").split())
    sizes = samples(tmp_path / "1")
    assert sizes == samples(tmp_path / "2") and sizes == sorted(sizes) and set(sizes) == {8, 16, 24, 32}
    for left, right in zip(curve(tmp_path / "1"), curve(tmp_path / "2"), strict=True):
        for name in ("train/loss", "train/learning_rate", "data/tokens"):
            assert left.get(name) == pytest.approx(right.get(name), abs=2e-5), (left["step"], name)
    assert_same_weights(weights(tmp_path / "1"), weights(tmp_path / "2"), 1e-4)


def test_short_sequences_first_in_larger_batches(tmp_path):
    """Four times the samples up to the tokens where sequences become four times as long: a step has as many tokens all
    along, where it would have four times as many; and a killed run, on other processes, goes on with the same."""
    short, long = (make_shards(tmp_path / str(length), max_length=length, pairs=False) for length in (8, 32))
    means = [ShardReader(each).mean_length for each in (short, long)]
    assert means[1] == pytest.approx(19, abs=1) and means[0] == pytest.approx(7, abs=0.5)
    data = json.dumps(
        {
            "sources": [{"path": str(short), "name": "short"}, {"path": str(long), "name": "long"}],
            "phases": [{"until_tokens": 2000, "weights": {"short": 1}}, {"weights": {"long": 1}}],
        }
    )
    sized = (
        "--train.max_steps",
        "12",
        "--checkpoint.every_steps",
        "3",
        "--train.global_batch_size",
        "12",
        "--train.batch_phases",
        "[{global_batch_size: 32, until_tokens: 2000}]",
        *NO_DROPOUT,
    )
    output = train(data, tmp_path / "whole", *sized, "--train.micro_batch_size", "4")
    assert "accumulation x 1 process; 32 up to 2,000 tokens" in " ".join(output.replace("│", " ").split())
    assert samples(tmp_path / "whole") == [32] * 9 + [12] * 3
    counted = [0, *(line["data/tokens"] for line in curve(tmp_path / "whole") if "data/tokens" in line)]
    tokens = [after - before for before, after in zip(counted, counted[1:], strict=False)]
    assert max(tokens) < 1.4 * min(tokens)
    cut = pretrain_arguments(data, tmp_path / "cut", *sized, "--train.micro_batch_size", "2")
    kill_at(8, cut, 2, checkpoints=2)
    assert "resumed from step 6" in resume(cut)
    assert samples(tmp_path / "cut") == samples(tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / "cut"), 1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            (
                "--train.batch_phases",
                "[{global_batch_size: 8, until_tokens: 9}, {global_batch_size: 8, until_tokens: 9}]",
            ),
            "train.batch_phases: found an end at 9 after 9",
        ),
        (
            ("--train.batch_phases", "[{global_batch_size: 0, until_tokens: 9}]"),
            "train.batch_phases.global_batch_size: found 0, expected 1 to 16777216",
        ),
        (("--train.batch_phases", "[{global_batch_size: 8, until_tokens: 9}]", *RUN), "expected one of the two"),
        (
            (
                "--train.batch_phases",
                "[{global_batch_size: 8, until_tokens: 9}]",
                "--masking.rate",
                "0.3",
                "--masking.final_rate",
                "0.1",
            ),
            "batches of several sizes, expected null",
        ),
    ],
)
def test_sizes_that_contradict_are_one_line(data, tmp_path, capsys, options, said):
    assert main(pretrain_arguments(data, tmp_path / "run", *options)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


@pytest.mark.slow
def test_killed_while_the_batch_grows(data, tmp_path):
    """At stage 3; what a resume does at the others tests/distributed/test_resume.py shows."""
    whole, cut = (pretrain_arguments(data, tmp_path / name, *RUN, "--zero.stage", "3") for name in ("whole", "cut"))
    finish(ForkedRun(whole, 2))
    grown = next(step for step, size in enumerate(samples(tmp_path / "whole")) if size == 32)
    assert grown > 12, "the kill comes before the batch has its full size"
    assert_killed_equals_whole(tmp_path / "whole", 10, cut, 2)
