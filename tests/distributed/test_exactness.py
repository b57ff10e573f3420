"""The same gradient for any split of a global batch, against a plain loop without DeepSpeed."""

import numpy as np
import pytest
import torch

from cloze.launch.checkpoint.weights import read_weights
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.shards.reader import ShardReader
from tests.engine_reports import assert_formats, formats_main
from tests.forked import ForkedRun
from tests.launching import NO_DROPOUT, assert_same_weights, curve, finish, pretrain_arguments, train, weights
from tests.synthetic import make_shards

ONE_STEP = (*NO_DROPOUT, "--train.max_steps", "1", "--schedule.warmup_steps", "0", "--checkpoint.every_steps", "0")
# (processes, micro-batch): 16 = 2 x 8 accumulation x 1, 2 x 4 x 2, 8 x 1 x 2
SPLITS = ((1, 2), (2, 2), (2, 8))
# Adam's first step is 3e-3 wide, whatever the gradient. fp32 sums in another order move it by a few 1e-7, and by more
# where a gradient is as small as AdamW's eps of 1e-6; a wrong weight of a sample moves it by 1e-4 and more.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("exactness"))


def plain_step(data, reduction: str) -> dict[str, torch.Tensor]:
    """One AdamW step on the first global batch as a single micro-batch: no DeepSpeed, no accumulation."""
    stream = BatchStream(
        ShardReader(data, "train"), global_batch_size=16, streams=16, micro_batch_size=16, rank=0, world_size=1, seed=42
    )
    batch = next(stream).micro_batches[0]
    stream.close()
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    model = BertForPreTraining(config)
    init_weights(model, 42)
    output = model(**batch)
    if reduction == "tokens":
        mlm = output.mlm_losses.mean()
    else:
        of_sample = torch.bucketize(batch["masked_positions"], batch["sequence_offsets"][1:].long(), right=True)
        mlm = torch.stack([output.mlm_losses[of_sample == sample].mean() for sample in range(16)]).mean()
    (mlm + output.next_sentence_losses.mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=3e-3, eps=1e-6
    ).step()
    return model.state_dict()


def test_the_micro_batches_differ_threefold_in_masked_tokens(data):
    stream = BatchStream(
        ShardReader(data, "train"), global_batch_size=16, streams=16, micro_batch_size=2, rank=0, world_size=1, seed=42
    )
    counts = [len(micro["labels"]) for micro in next(stream).micro_batches]
    stream.close()
    assert max(counts) >= 3 * min(counts)


@pytest.fixture(scope="module")
def one_step(data, tmp_path_factory):
    """Runs of one step, made once for each split."""
    found = {}

    def get(processes: int, micro: int):
        split = processes, micro
        if split not in found:
            found[split] = tmp_path_factory.mktemp("one-step") / "run"
            train(data, found[split], *ONE_STEP, "--train.micro_batch_size", str(micro), processes=processes)
        return found[split]

    return get


def test_any_split_takes_the_step_of_a_plain_loop(data, one_step):
    """At stage 0, with which the tests below compare the others; test_elastic.py changes the split at each."""
    expected = plain_step(data, "tokens")
    for split in SPLITS:
        assert_same_weights(expected, weights(one_step(*split)), TOLERANCE)


@pytest.mark.slow
def test_mean_per_sample_takes_the_step_of_a_plain_loop(data, tmp_path):
    expected = plain_step(data, "samples")
    for processes, micro in SPLITS:
        run = tmp_path / f"{processes}x{micro}"
        train(
            data,
            run,
            *ONE_STEP,
            "--train.micro_batch_size",
            str(micro),
            "--train.loss_reduction",
            "samples",
            processes=processes,
        )
        assert_same_weights(expected, weights(run), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_every_stage_trains_alike_and_evaluation_counts_each_sample_once(data, tmp_path, precision):
    """5 steps at every ZeRO stage on 2 processes, 24 validation samples in micro-batches of 5: a rest, and a filler.
    The start table names the formats that the steps have.
    """
    losses = []
    for stage in ("0", "1", "2", "3"):
        run = tmp_path / stage
        command = pretrain_arguments(
            data,
            run,
            *NO_DROPOUT,
            "--train.max_steps",
            "5",
            "--zero.stage",
            stage,
            "--train.precision",
            precision,
            "--train.micro_batch_size",
            "2",
        )
        assert_formats(finish(ForkedRun(command, 2, formats_main)), precision, stage, processes=2, steps=5)
        lines = curve(run)
        assert read_weights(run, None, print)[0] == 5
        losses.append([value for line in lines for name, value in line.items() if name.endswith("mlm_loss")])
        assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    tolerance = 1e-5 if precision == "fp32" else 2e-2  # bf16 keeps 8 bits: autocast rounds elsewhere than bf16 weights
    for other in losses[1:]:
        np.testing.assert_allclose(losses[0], other, atol=tolerance)


# Parts of a model that a step uses several times, or that several layers share.
SHARED = {
    "shared layers, relative bias, grouped queries": (
        *("--model.num_layer_groups", "1", "--model.embedding_size", "16"),
        *("--model.relative_position_buckets", "32", "--model.num_key_value_heads", "1"),
    ),
    "relative attention": (
        *("--model.position_embedding", "none", "--model.relative_attention", "both", "--model.relative_buckets", "8"),
        *("--model.relative_distances", "32", "--model.relative_norm", "true"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHARED)
def test_shared_parts_train_alike_at_the_stages_and_recomputed(data, tmp_path, shape):
    """Three steps on 2 processes, and with layers that are computed again in backward. Stage 1 has the optimizer of
    stage 2, and sums gradients when all of backward has run.
    """
    options = (*NO_DROPOUT, *SHARED[shape], "--train.max_steps", "3", "--train.micro_batch_size", "2")
    for stage, recomputed in (("0", "none"), ("0", "all"), ("2", "none"), ("3", "all")):
        run = tmp_path / f"{stage}-{recomputed}"
        further = ("--zero.stage", stage, "--train.gradient_checkpointing", recomputed)
        train(data, run, *options, *further, processes=2)
        assert_same_weights(weights(tmp_path / "0-none"), weights(run), 3 * TOLERANCE)


def test_validation_is_the_same_on_one_and_on_two_processes(one_step):
    """24 samples in micro-batches of 8: two ranks get 16 places in the second round, 8 of them fillers."""
    first = []
    for processes in (1, 2):
        lines = curve(one_step(processes, 8))
        first.append(next(line for line in lines if "validation/mlm_loss" in line))
    assert first[0].keys() == first[1].keys()
    for name, value in first[0].items():
        assert first[1][name] == pytest.approx(value, abs=1e-6), name
