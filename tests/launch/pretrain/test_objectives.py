"""Objectives beside masked tokens: the loss against a loop written here, any split, a killed run, what does not fit."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers

from cloze.launch.cli import main
from cloze.launch.config import BatchArithmetic, PretrainConfig, TrainConfig
from cloze.launch.predict.default_operation import operation_for
from cloze.launch.pretrain.objectives.factory import make_objective
from cloze.launch.pretrain.objectives.masked import is_real
from cloze.launch.pretrain.objectives.replaced_tokens import generator_config
from cloze.launch.pretrain.objectives.span_boundary import spans
from cloze.launch.pretrain.objectives.table import OBJECTIVES
from cloze.launch.pretrained.loading import load_model
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.training.loop import dropout_seed
from cloze.model.config import BertConfig
from cloze.model.huggingface import load_note, load_pretrained
from cloze.model.sampling import token_bits
from cloze.model.tasks import BertForReplacedTokenDetection
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.loading.streams import RunMasking
from cloze.pipeline.shards.reader import ShardReader
from tests.forked import ForkedRun
from tests.launch.errors import error_of
from tests.launch.finetune.running import finetune
from tests.launch.finetune.small import write_tsv
from tests.launching import (
    NO_DROPOUT,
    assert_killed_equals_whole,
    assert_same_weights,
    curve,
    finish,
    pretrain_arguments,
    saved,
    train,
    weights,
)
from tests.model.model_batches import TINY, assert_equal_gradients, pretraining_model, reference
from tests.synthetic import make_shards
from tests.tables import assert_same_names

ELECTRA = (
    "--objective",
    "replaced_tokens",
    "--model.embedding_size",
    "16",
    "--model.pooler",
    "false",
    "--objective_options.generator_size",
    "0.5",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    """A folder of transformers' own: four layers, the student's width, the shards' tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    torch.manual_seed(3)
    transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            initializer_range=0.2,
        )
    ).save_pretrained(folder)
    for path in (data / "tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def distilled(teacher) -> tuple[str, ...]:
    return (
        *NO_DROPOUT,
        "--objective",
        "distillation",
        "--objective_options.teacher",
        str(teacher),
        "--init_from",
        str(teacher),
        "--init_layers",
        "[1, 3]",
    )


def expected_flops(data) -> float:
    """Of a token: forward and backward of the student's two layers, forward of the teacher's four, width 32."""
    manifest = ShardReader(data, "train").manifest
    lengths = [length for length, count in enumerate(manifest.splits["train"].length_histogram) for _ in range(count)]
    mean_square = sum(length**2 for length in lengths) / sum(lengths)
    layer, head = 6 * (4 * 32**2 + 2 * 32 * 64) + 12 * 32 * mean_square, manifest.masked_share * 6 * (32 * 64 + 32**2)
    return 2 * layer + head + (4 * layer + head) / 3


def expected_losses(data, teacher) -> dict[str, float]:
    """The three means over the first global batch by transformers alone, in padded form."""
    theirs = transformers.BertForMaskedLM.from_pretrained(teacher, attn_implementation="eager").eval()
    student = transformers.BertForMaskedLM.from_pretrained(teacher, attn_implementation="eager").eval()
    student.bert.encoder.layer = torch.nn.ModuleList([theirs.bert.encoder.layer[1], theirs.bert.encoder.layer[3]])
    stream = BatchStream(
        ShardReader(data, "train"), global_batch_size=16, streams=16, micro_batch_size=16, rank=0, world_size=1, seed=42
    )
    (batch,) = next(stream).micro_batches
    stream.close()
    sums, tokens = torch.zeros(3, dtype=torch.float64), 0
    for low, high in batch["sequence_offsets"].unfold(0, 2, 1).tolist():
        inside = (batch["masked_positions"] >= low) & (batch["masked_positions"] < high)
        places, labels = batch["masked_positions"][inside] - low, batch["labels"][inside]
        given = {
            "input_ids": batch["input_ids"][None, low:high],
            "token_type_ids": batch["token_type_ids"][None, low:high],
            "output_hidden_states": True,
        }
        with torch.no_grad():
            one, other = student(**given), theirs(**given)
        own, shown = one.logits[0, places], other.logits[0, places]
        sums[0] += torch.nn.functional.cross_entropy(own, labels, reduction="sum")
        p = torch.softmax(shown / 2, -1)
        sums[1] += 4 * (p * (p.log() - torch.log_softmax(own / 2, -1))).sum()
        vectors, wanted = one.hidden_states[-1][0], other.hidden_states[-1][0]
        sums[2] += (1 - (vectors * wanted).sum(-1) / vectors.norm(dim=-1) / wanted.norm(dim=-1)).sum()
        tokens += high - low
    means = sums / torch.tensor([len(batch["labels"]), len(batch["labels"]), tokens])
    return dict(zip(("train/mlm_loss", "train/soft_loss", "train/cosine_loss"), means.tolist(), strict=True))


def test_distillation_has_the_losses_of_the_reference_and_one_step_for_any_split(data, teacher, tmp_path):
    one = ("--train.max_steps", "1", "--schedule.warmup_steps", "0", "--train.precision", "fp32")
    for processes, micro in ((1, 16), (2, 2)):
        shown = train(
            data,
            tmp_path / f"{processes}",
            *distilled(teacher),
            *one,
            "--train.micro_batch_size",
            str(micro),
            processes=processes,
        )
    (flops,) = re.findall(r"FLOPs a token .*?([\d.]+) M", shown)
    assert 1e6 * float(flops) == pytest.approx(expected_flops(data), rel=1e-3)
    (line,) = (line for line in read_metrics(tmp_path / "2") if "train/loss" in line)
    expected = expected_losses(data, teacher)
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert line["train/loss"] == pytest.approx(
        2 * line["train/mlm_loss"]
        + 5 * line["train/soft_loss"]
        + line["train/cosine_loss"]
        + line["train/next_sentence_loss"]
    )
    # The first step of Adam is 3e-3 wide for any gradient; sums in another order move it by 1e-5 here.
    assert_same_weights(weights(tmp_path / "1"), weights(tmp_path / "2"), 5e-5)
    assert not any("teacher" in name for name in weights(tmp_path / "1"))
    assert main(["export", str(tmp_path / "1"), "--output", str(tmp_path / "exported")]) == 0
    assert transformers.BertForMaskedLM.from_pretrained(tmp_path / "exported").config.num_hidden_layers == 2


def next_tokens_until(data, step) -> tuple[str, ...]:
    """Up to this step, of batches of 16."""
    counts = ShardReader(data, "train").manifest.splits["train"].counts
    return "--masking.next_tokens_until", str(16 * step * counts["tokens"] // counts["samples"])


def next_token_loss(data, teacher) -> float:
    """Mean over the first global batch by transformers' decoder, which shifts the labels itself, a sample at a time."""
    theirs = transformers.BertLMHeadModel.from_pretrained(teacher, is_decoder=True, attn_implementation="eager").eval()
    stream = BatchStream(
        ShardReader(data, "train"), global_batch_size=16, streams=16, micro_batch_size=16, rank=0, world_size=1, seed=42
    )
    indices = next(stream).indices
    stream.close()
    total, count = 0.0, 0
    for index in indices:
        sample, _ = ShardReader(data, "train").take(np.array([index]), None)
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        segments = (torch.arange(ids.shape[1]) >= int(sample.segment_b_start[0])).long()[None]
        with torch.no_grad():
            loss = theirs(input_ids=ids, token_type_ids=segments, labels=ids).loss
        total, count = total + (ids.shape[1] - 1) * loss.item(), count + ids.shape[1] - 1
    return total / count


def test_next_tokens_have_the_loss_of_a_decoder_and_one_step_for_any_split(data, teacher, tmp_path):
    arguments = (
        *NO_DROPOUT,
        *next_tokens_until(data, 2),
        "--train.max_steps",
        "4",
        "--schedule.warmup_steps",
        "0",
        "--train.precision",
        "fp32",
        "--train.log_every_steps",
        "1",
        "--model.num_hidden_layers",
        "4",
        "--init_from",
        str(teacher),
    )
    for processes, micro in ((1, 16), (2, 2)):
        train(data, tmp_path / f"{processes}", *arguments, "--train.micro_batch_size", str(micro), processes=processes)
    lines = {line["step"]: line for line in read_metrics(tmp_path / "2") if "train/loss" in line}
    assert lines[1]["train/next_token_loss"] == pytest.approx(next_token_loss(data, teacher), rel=1e-4)
    for step in (1, 2):  # the first token sees no other, so that pairs have no loss
        assert lines[step]["train/loss"] == pytest.approx(lines[step]["train/next_token_loss"])
        assert not {"train/mlm_loss", "train/next_sentence_loss"} & set(lines[step])
    for step in (3, 4):
        assert "train/next_token_loss" not in lines[step]
        assert lines[step]["train/loss"] == pytest.approx(
            lines[step]["train/mlm_loss"] + lines[step]["train/next_sentence_loss"]
        )
    # Each step of Adam is 3e-3 wide for any gradient; sums in another order move it a little.
    assert_same_weights(weights(tmp_path / "1"), weights(tmp_path / "2"), 2e-4)


def test_next_tokens_are_for_masked_tokens_alone_and_leave_sources_out(data, tmp_path, capsys):
    until = next_tokens_until(data, 2)
    for options, expected in (
        (
            ("--objective", "span_boundary", *until),
            f"masking.next_tokens_until: found {until[1]} with objective span_boundary, expected 0, "
            "or objective masked",
        ),
        (
            ("--model.convolution_size", "3", *until),
            f"masking.next_tokens_until: found {until[1]} with model.convolution_size 3, which sees the next token",
        ),
        (("--masking.next_tokens_until", "-1"), "masking.next_tokens_until: found -1, expected at least 0"),
        (("--train.max_steps", "2", *until), "masking.next_tokens_until: found"),
        (
            ("--train.max_steps", "4", "--train.batch_phases", "[{global_batch_size: 8, until_tokens: 9999}]", *until),
            "masking.next_tokens_until: found",  # four batches of 8 are two of 16
        ),
        (
            ("--evaluation.patience", "2", *until),
            "evaluation.patience: found 2 with masking.next_tokens_until, expected null",
        ),
    ):
        assert expected in error_of(capsys, *pretrain_arguments(data, tmp_path / "refused", *options))
    assert not (tmp_path / "refused").exists()
    mixture = {"sources": [{"path": str(data), "name": name, "weight": 1} for name in ("one", "two")]}
    train(json.dumps(mixture), tmp_path / "mixed", *until, "--train.max_steps", "4", "--train.log_every_steps", "1")
    lines = [line for line in read_metrics(tmp_path / "mixed") if "train/loss" in line]
    assert [("train/next_token_loss" in line, "train/mlm_loss/one" in line) for line in lines] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]


HALF_CAUSAL = ("--train.causal_share", "0.5", "--model.shifted_predictions", "true")


def first_step(objective, data, model, processes: int, micro: int) -> list[dict]:
    """Gradients of the first global batch of 16, summed over the processes; returns the samples of each of them."""
    config, parts = objective.config, []
    for rank in range(processes):
        stream = BatchStream(
            ShardReader(data, "train"),
            global_batch_size=16,
            streams=16,
            micro_batch_size=micro,
            rank=rank,
            world_size=processes,
            seed=42,
            masking=RunMasking(causal_share=config.train.causal_part),
        )
        parts.append(next(stream).micro_batches)
        stream.close()
    totals = torch.tensor([objective.counts(part) for part in parts], dtype=torch.float64).sum(0)
    model.zero_grad()
    for micro_batch in (each for part in parts for each in part):
        objective(model(**micro_batch), micro_batch, totals)[0].backward()
    return [each for part in parts for each in part]


def mixed_loss(theirs, micro_batches, share: float) -> torch.Tensor:
    """By transformers, a sample at a time: means over next and masked tokens, from the vector before, and pairs."""
    following, masked, pairs = [], [], []
    for each in micro_batches:
        causal = each.get("causal", False)
        for number, (low, high) in enumerate(each["sequence_offsets"].unfold(0, 2, 1).tolist()):
            ids, length = each["input_ids"][None, low:high], high - low
            hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1) * causal
            given = {"input_ids": ids, "token_type_ids": each["token_type_ids"][None, low:high]}
            found = theirs(**given, attention_mask=hidden[None, None])
            logits = found.prediction_logits[0]
            if causal:
                following.append(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none"))
                continue
            inside = (each["masked_positions"] >= low) & (each["masked_positions"] < high)
            before, labels = each["masked_positions"][inside] - low - 1, each["labels"][inside]
            masked.append(torch.nn.functional.cross_entropy(logits[before], labels, reduction="none"))
            label = each["next_sentence_label"][number : number + 1]
            pairs.append(torch.nn.functional.cross_entropy(found.seq_relationship_logits, label))
    return share * torch.cat(following).mean() + (1 - share) * torch.cat(masked).mean() + torch.stack(pairs).mean()


def test_masked_and_next_tokens_have_the_gradient_of_the_reference_for_any_split(data):
    plain = dataclasses.replace(TINY, vocab_size=64)
    config = PretrainConfig(
        "",
        "",
        model=dataclasses.replace(plain, shifted_predictions=True),
        train=TrainConfig(global_batch_size=16, causal_share=0.25),
    )
    objective, model = make_objective(config), pretraining_model(config.model)
    unshifted = pretraining_model(plain)
    unshifted.load_state_dict(model.state_dict())
    theirs = reference(unshifted)
    mixed_loss(theirs, first_step(objective, data, model, 1, 4), 0.25).backward()
    for processes, micro in ((1, 4), (2, 2)):
        first_step(objective, data, model, processes, micro)
        for twin, parameter in zip(unshifted.parameters(), model.parameters(), strict=True):
            twin.grad = parameter.grad  # transformers has names for it
        assert_equal_gradients(unshifted, theirs)


def test_a_run_of_masked_and_next_tokens_is_the_same_for_any_split_and_can_be_used(data, tmp_path, capsys):
    """Both kinds in two steps, masked ones alone in the third."""
    until = next_tokens_until(data, 2)
    arguments = (*NO_DROPOUT, *HALF_CAUSAL, *until, "--train.max_steps", "3", "--evaluation.every_steps", "3")
    arguments = (*arguments, "--train.log_every_steps", "1")
    for processes, micro in ((1, 16), (2, 2)):  # 8 of each kind
        options = (*arguments, "--schedule.warmup_steps", "0", "--train.micro_batch_size", str(micro))
        shown = train(data, tmp_path / f"{processes}", *options, processes=processes)
    assert "16 = 2 micro x 4 accumulation x 2 processes" in shown
    for line in read_metrics(tmp_path / "2"):
        if "train/loss" in line:
            predicted = line["train/mlm_loss"]
            if line["step"] < 3:
                predicted = 0.5 * predicted + 0.5 * line["train/next_token_loss"]
            assert ("train/next_token_loss" in line) == (line["step"] < 3)
            assert line["train/loss"] == pytest.approx(predicted + line["train/next_sentence_loss"])
        if "validation/loss" in line:
            whole = line["validation/mlm_loss"] + line["validation/next_sentence_loss"]
            assert line["validation/loss"] == pytest.approx(whole)
    assert_same_weights(weights(tmp_path / "1"), weights(tmp_path / "2"), 2e-4)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "2"), "--output", str(tmp_path / "exported")]) == 0
    assert "transformers lacks this shape or head" in capsys.readouterr().err
    (tmp_path / "held-out.txt").write_text("w1 w2 w3\n")
    for score in ("pseudo", "causal"):
        found = []
        for model in ("2", "exported"):
            lines = ["evaluate", str(tmp_path / model), "--suite", "lines", "--data", str(tmp_path / "held-out.txt")]
            assert main([*lines, "--score", score, "--json", str(tmp_path / "found.json")]) == 0
            found.append(json.loads((tmp_path / "found.json").read_text())["log_likelihood"])
        assert found[0] == pytest.approx(found[1])


def test_a_share_of_next_tokens_that_does_not_fit_is_refused_in_one_line(data, tmp_path, capsys):
    for options, expected in (
        (
            ("0.3",),
            "train.causal_share: found 0.3 of train.global_batch_size = 16, expected a share of whole samples, such ",
        ),
        (("1",), "train.causal_share: found 1.0, expected at least 0, below 1"),
        (("0.5", "--objective", "span_boundary"), "train.causal_share: found 0.5 with objective span_boundary"),
        (("0.5", "--model.convolution_size", "3"), "train.causal_share: found 0.5 with model.convolution_size 3"),
    ):
        words = pretrain_arguments(data, tmp_path / "refused", "--train.causal_share", *options)
        assert expected in error_of(capsys, *words)
    shifted = ("--model.shifted_predictions", "true", "--objective", "span_boundary")
    said = error_of(capsys, *pretrain_arguments(data, tmp_path / "refused", *shifted))
    assert "model.shifted_predictions: found true with objective span_boundary, expected false" in said
    assert not (tmp_path / "refused").exists()
    with pytest.raises(
        UserError, match="causal_share: found 0.25 of train.global_batch_size = 4, expected samples that"
    ):
        BatchArithmetic.of(TrainConfig(global_batch_size=4, causal_share=0.25), 2)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [*(name for name in OBJECTIVES if name != "masked"), "half_causal"])
def test_a_killed_run_resumes_exactly(data, teacher, tmp_path, objective):
    """Masked tokens alone are tests/distributed/test_resume.py's."""
    named = {
        "distillation": distilled(teacher),
        "replaced_tokens": ELECTRA,
        "half_causal": (*HALF_CAUSAL, *next_tokens_until(data, 12)),
    }.get(objective, ("--objective", objective))
    arguments = ("--train.max_steps", "24", "--checkpoint.every_steps", "8", "--zero.stage", "2", *named)
    whole, cut = (pretrain_arguments(data, tmp_path / name, *arguments) for name in ("whole", "cut"))
    finish(ForkedRun(whole, 2))
    assert_killed_equals_whole(tmp_path / "whole", 12, cut, 2)
    if objective == "half_causal":
        kinds = ["train/next_token_loss" in line for line in curve(tmp_path / "cut") if "train/loss" in line]
        assert kinds == sorted(kinds, reverse=True) and 8 < sum(kinds) < 16, "next tokens end after the resume"


def expected_boundary_loss(data, run, folder) -> tuple[float, float]:
    """Mean loss and share of hits over the first global batch: vectors by transformers, spans by loops, the head by its
    formula."""
    main(["export", str(run), "--output", str(folder)])
    encoder = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    own = weights(run)
    stream = BatchStream(
        ShardReader(data, "train"), global_batch_size=16, streams=16, micro_batch_size=16, rank=0, world_size=1, seed=42
    )
    (batch,) = next(stream).micro_batches
    stream.close()
    masked = dict(zip(batch["masked_positions"].tolist(), batch["labels"].tolist(), strict=True))
    losses, hits = [], []
    for low, high in batch["sequence_offsets"].unfold(0, 2, 1).tolist():
        with torch.no_grad():
            hidden = encoder(
                batch["input_ids"][None, low:high], token_type_ids=batch["token_type_ids"][None, low:high]
            ).last_hidden_state[0]
        for place in (place for place in masked if low <= place < high):
            start, end = place, place
            while start - 1 in masked:
                start -= 1
            while end + 1 in masked:
                end += 1
            vector = torch.cat(
                (
                    hidden[start - 1 - low],
                    hidden[end + 1 - low],
                    own["boundary_positions.weight"][min(place - start, 2)],
                )
            )
            for layer in ("0", "3"):
                vector = torch.nn.functional.gelu(
                    own[f"boundary_layers.{layer}.weight"] @ vector + own[f"boundary_layers.{layer}.bias"]
                )
                vector = torch.nn.functional.layer_norm(vector, (32,), eps=1e-12)  # of weight 1 and bias 0
            scores = own["bert.embeddings.word.weight"][:64] @ vector
            losses.append(torch.nn.functional.cross_entropy(scores, torch.tensor(masked[place])))
            hits.append(int(scores.argmax() == masked[place]))
    return float(torch.stack(losses).mean()), sum(hits) / len(hits)


def test_span_boundaries_have_the_loss_of_their_formula_and_one_step_for_any_split(data, tmp_path):
    run = (
        *NO_DROPOUT,
        "--objective",
        "span_boundary",
        "--objective_options.longest",
        "3",
        "--train.max_steps",
        "1",
        "--train.precision",
        "fp32",
    )
    # One step at the rate 0, so that the checkpoint holds the weights that the loss was measured with.
    train(data, tmp_path / "still", *run, "--schedule.warmup_steps", "1", "--train.micro_batch_size", "4")
    (line,) = (line for line in read_metrics(tmp_path / "still") if "train/loss" in line)
    loss, accuracy = expected_boundary_loss(data, tmp_path / "still", tmp_path / "exported")
    assert line["train/boundary_loss"] == pytest.approx(loss, rel=1e-4)
    assert line["train/boundary_accuracy"] == pytest.approx(accuracy)
    assert line["train/loss"] == pytest.approx(
        line["train/mlm_loss"] + line["train/boundary_loss"] + line["train/next_sentence_loss"]
    )
    for processes, micro in ((1, 16), (2, 2)):
        train(
            data,
            tmp_path / f"{processes}",
            *run,
            "--schedule.warmup_steps",
            "0",
            "--train.micro_batch_size",
            str(micro),
            processes=processes,
        )
    assert_same_weights(weights(tmp_path / "1"), weights(tmp_path / "2"), 5e-5)


class Reference(torch.nn.Module):
    """ELECTRA of transformers' two classes, which share their embeddings."""

    def __init__(self, detector, generator) -> None:
        super().__init__()
        self.detector = transformers.ElectraForPreTraining.from_pretrained(detector, attn_implementation="eager")
        self.generator = transformers.ElectraForMaskedLM.from_pretrained(generator, attn_implementation="eager")
        self.generator.electra.embeddings = self.detector.electra.embeddings
        self.generator.generator_lm_head.weight = self.detector.electra.embeddings.word_embeddings.weight
        self.eval()

    def forward(self, batch: dict, seed: int) -> dict[str, torch.Tensor]:
        """The four means over a batch, sample after sample; `seed`: that of the step."""
        found, original = {name: [] for name in ("mlm", "hits", "detection", "right")}, batch["input_ids"].clone()
        original[batch["masked_positions"]] = batch["labels"]
        drawn_by = token_bits(seed, original, batch["sequence_offsets"], batch["masked_positions"]).tolist()
        for low, high in batch["sequence_offsets"].unfold(0, 2, 1).tolist():
            segments = batch["token_type_ids"][None, low:high]
            scores = self.generator(batch["input_ids"][None, low:high], token_type_ids=segments).logits[0]
            shown = original[low:high].clone()
            for number, place in enumerate((batch["masked_positions"] - low).tolist()):
                if not 0 <= place < high - low:
                    continue
                label, row = batch["labels"][number], scores[place]
                found["mlm"].append(torch.nn.functional.cross_entropy(row, label))
                found["hits"].append((row.argmax() == label).float())
                border, summed = drawn_by[number] / 2**32, 0.0
                for token, share in enumerate(row.detach().double().softmax(-1).tolist()):
                    summed += share
                    if summed > border:
                        shown[place] = token
                        break
            replaced = (shown != original[low:high]).float()
            says = self.detector(shown[None], token_type_ids=segments).logits[0]
            found["detection"] += torch.nn.functional.binary_cross_entropy_with_logits(says, replaced, reduction="none")
            found["right"] += ((says > 0) == (replaced > 0)).float()
        return {name: torch.stack(values).mean() for name, values in found.items()}


def electra_batch(data) -> dict:
    stream = BatchStream(
        ShardReader(data, "train"), global_batch_size=16, streams=16, micro_batch_size=16, rank=0, world_size=1, seed=42
    )
    (batch,) = next(stream).micro_batches
    stream.close()
    return batch


def export_both(run, folder) -> tuple:
    for part in (("detector",), ("generator", "--generator", "true")):
        assert main(["export", str(run), "--output", str(folder / part[0]), *part[1:]]) == 0
    return folder / "detector", folder / "generator"


def test_replaced_tokens_have_the_losses_and_the_step_of_the_reference_for_any_split(data, tmp_path):
    run = (*NO_DROPOUT, *ELECTRA, "--train.max_steps", "1", "--train.precision", "fp32")
    # One step at the rate 0, so that the checkpoint holds the weights that the losses were measured with.
    train(data, tmp_path / "still", *run, "--schedule.warmup_steps", "1", "--train.micro_batch_size", "4")
    (line,) = (line for line in read_metrics(tmp_path / "still") if "train/loss" in line)
    reference = Reference(*export_both(tmp_path / "still", tmp_path / "before"))
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    means = reference(electra_batch(data), dropout_seed(42, 0))
    names = ("mlm_loss", "mlm_accuracy", "detection_loss", "detection_accuracy")
    for name, mean in zip(names, means.values(), strict=True):
        assert line[f"train/{name}"] == pytest.approx(mean.item(), rel=1e-5), name
    loss = means["mlm"] + 50 * means["detection"]
    assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    # The first step of plain Adam is the rate times the gradient's sign, wherever it is no rounding: as clipped here.
    loss.backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    moved = ("--schedule.warmup_steps", "0", "--optimizer.weight_decay", "0", "--optimizer.eps", "1e-12")
    for processes, micro, stage in ((1, 16, 0), (2, 2, 2)):
        train(
            data,
            tmp_path / f"{processes}",
            *run,
            *moved,
            "--train.micro_batch_size",
            str(micro),
            "--zero.stage",
            str(stage),
            processes=processes,
        )
    after = Reference(*export_both(tmp_path / "1", tmp_path / "after")).state_dict()
    checked = 0
    for name, parameter in reference.named_parameters():
        clear = parameter.grad.abs() > 1e-5
        difference = (after[name] - before[name])[clear] + 3e-3 * parameter.grad[clear].sign()
        assert difference.abs().max() < 3e-5 if clear.any() else True, name
        checked += int(clear.sum())
    assert checked > 10_000
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert_same_weights(one, {name: two[name] for name in one if name in two}, 5e-5)
    # The run's folder stands for the discriminator.
    loaded = load_model(tmp_path / "1")
    assert type(loaded.model) is BertForReplacedTokenDetection and operation_for([str(tmp_path / "1")]) == "embed"
    ids = torch.arange(5, 15)[None]
    expected = transformers.ElectraModel.from_pretrained(tmp_path / "after/detector", attn_implementation="eager")(ids)
    torch.testing.assert_close(loaded.model.bert(ids).last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=0)


# Of each objective a term, its weight where there is but one beside masked tokens, stages of ZeRO. Masked tokens alone
# are split by tests/distributed/test_elastic.py.
SPLIT = {
    "replaced_tokens": ("detection", 50, (1, 3)),
    "span_boundary": ("boundary", 1, (3,)),
    "distillation": ("soft", None, (3,)),
}


def test_every_objective_is_split_over_processes():
    assert_same_names(
        OBJECTIVES, {"masked", *SPLIT}, "SPLIT in this file, how an objective is trained by two processes"
    )


@pytest.mark.slow
@pytest.mark.parametrize("objective", SPLIT)
def test_objectives_are_the_same_on_other_processes_and_in_evaluation(data, teacher, tmp_path, objective):
    """Two processes up to a checkpoint, one process from there on: the curves of one process all along."""
    term, weight, stages = SPLIT[objective]
    named = {"replaced_tokens": (*NO_DROPOUT, *ELECTRA), "distillation": distilled(teacher)}.get(
        objective, (*NO_DROPOUT, "--objective", objective)
    )
    run = (
        *named,
        "--train.max_steps",
        "8",
        "--evaluation.every_steps",
        "4",
        "--checkpoint.every_steps",
        "4",
        "--checkpoint.keep_last",
        "2",
        "--train.learning_rate",
        "1e-3",
    )
    train(data, tmp_path / "whole", *run, "--train.micro_batch_size", "16")
    expected = [line for line in curve(tmp_path / "whole") if f"train/{term}_loss" in line]
    for stage in stages:
        output = tmp_path / f"stage-{stage}"
        train(data, output, *run, "--train.micro_batch_size", "4", "--zero.stage", str(stage), processes=2)
        shutil.rmtree(saved(output)[-1])  # step 8: one process goes on from step 4, which two have saved
        train(data, output, *run, "--train.micro_batch_size", "8", "--zero.stage", str(stage))
        found = [line for line in curve(output) if f"train/{term}_loss" in line]
        for line, other in zip(expected, found, strict=True):
            for name in line.keys() & {
                f"train/{each}{kind}" for each in ("", "mlm_", f"{term}_") for kind in ("loss", "accuracy")
            }:
                assert other[name] == pytest.approx(line[name], rel=1e-3), (stage, line["step"], name)
        one, two = (
            [line for line in curve(each) if f"validation/{term}_loss" in line] for each in (tmp_path / "whole", output)
        )
        assert [line["step"] for line in one] == [0, 4, 8]
        for line, other in zip(one, two, strict=True):
            assert other[f"validation/{term}_loss"] == pytest.approx(line[f"validation/{term}_loss"], rel=1e-3)
            if weight:  # of two terms and next sentences
                assert other["validation/loss"] == pytest.approx(
                    other["validation/mlm_loss"]
                    + weight * other[f"validation/{term}_loss"]
                    + other.get("validation/next_sentence_loss", 0),
                    rel=1e-3,
                )


def test_generators_have_the_published_shapes():
    for name, size, expected in (
        ("electra-small", 1 / 4, (64, 1, 256, 12, 128)),
        ("base", 1 / 3, (256, 4, 1024, 12, 768)),
        ("large", 1 / 4, (256, 4, 1024, 24, 1024)),
    ):
        made = generator_config(BertConfig.preset(name), size)
        assert expected == (
            made.hidden_size,
            made.num_attention_heads,
            made.intermediate_size,
            made.num_hidden_layers,
            made.embedding_size,
        )
    grouped = BertConfig.preset("base", num_key_value_heads=4)
    assert (
        generator_config(grouped, 1 / 2).key_value_heads == 2 and generator_config(grouped, 1 / 3).key_value_heads == 4
    )


@pytest.mark.slow
def test_a_run_with_replaced_tokens_is_fine_tuned_from_its_discriminator(data, tmp_path):
    train(data, tmp_path / "run", *ELECTRA, "--train.max_steps", "2")
    main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "exported")])
    rows = [(f"w{2 * number + label} w{number + 7}", label) for number in range(12) for label in (0, 1)]
    file = write_tsv(tmp_path / "file.tsv", ("sentence", "label"), rows)
    for name in ("run", "exported"):  # the same weights: the same results
        finetune("sst2", tmp_path / name, file, file, tmp_path / f"tuned-{name}", "--epochs", 1)
    one, two = (load_pretrained(tmp_path / f"tuned-{name}/model") for name in ("run", "exported"))
    assert one[0] == two[0] and one[0].embedding_size == 16
    assert_same_weights(one[1], two[1])
    begun = weights(tmp_path / "run")["bert.encoder.layers.1.attention.qkv.weight"]
    assert (one[1]["bert.encoder.layers.1.attention.qkv.weight"] - begun).abs().max() < 0.1  # three steps of 3e-3
    assert load_note(tmp_path / "tuned-run/model", "model_type") == "cloze"


def test_what_replaced_tokens_need_is_one_line(data, tmp_path, capsys):
    for options, expected in (
        (("--model.embedding_size", "null"), "model.embedding_size, model.pooler: found null and false with objective"),
        (("--model.pooler", "true"), "found 16 and true with objective replaced_tokens, expected a width that both"),
        (("--objective_options.generator_layers", "0"), "objective_options.generator_layers: found 0, expected a"),
    ):
        assert expected in error_of(capsys, *pretrain_arguments(data, tmp_path / "run", *ELECTRA, *options))


def test_objectives_with_scores_that_mup_does_not_scale_are_refused(data, tmp_path, capsys):
    mup = ("--model.parametrization", "mup", "--model.base_hidden_size", "16")
    for options in (
        ("--objective", "span_boundary"),
        (*ELECTRA, "--model.embedding_size", "null", "--model.pooler", "true"),
    ):
        said = error_of(capsys, *pretrain_arguments(data, tmp_path / "run", *options, *mup))
        assert said.startswith("error: objective: found ") and "with model.parametrization mup, expected" in said


def test_a_teacher_that_does_not_fit_or_has_changed_is_one_line(data, teacher, tmp_path, capsys):
    foreign = make_shards(tmp_path / "foreign", vocab_size=80)
    run = tmp_path / "run"
    for given, options, expected in (
        (data, ("--objective_options.temperature", "0"), "objective_options.temperature: found 0, expected a"),
        (
            data,
            ("--objective_options.teacher", ""),
            "objective_options.teacher: found '', expected the name",
        ),
        (data, ("--objective_options.teacher", "2024"), "objective_options.teacher: found 2024, expected the name of"),
        (data, ("--init_layers", "[1, 9]"), "init_layers: found 9, expected 0 to 3, the layers of"),
        (data, ("--init_layers", "[1]"), "init_layers: found 1, expected one for each of model.num_hidden_layers = 2"),
        (data, ("--model.hidden_size", "16"), "model.hidden_size: found 16, expected 32: that of init_from"),
        (
            data,
            ("--init_from", "null", "--init_layers", "null", "--model.hidden_size", "16"),
            "objective_options.cosine: found 1.0 with model.hidden_size 16 and a",
        ),
        (foreign, (), f"that of the shards in {foreign}; prepare them with --tokenizer {teacher}"),
    ):
        assert expected in error_of(capsys, *pretrain_arguments(given, run, *distilled(teacher), *options))


def test_objectives_show_the_sources_of_a_mixture_and_take_all_masking_rates(data, teacher, tmp_path):
    """With dropout, and so many masked tokens that more vectors are read than there are tokens."""
    other = make_shards(tmp_path / "other", mask_sets=0, seed=5)
    mixture = {
        "sources": [
            {"path": str(make_shards(tmp_path / "one", mask_sets=0)), "name": "one", "weight": 1},
            {"path": str(other), "name": "two", "weight": 1},
        ]
    }
    options = {
        "span_boundary": ("--objective", "span_boundary"),
        "replaced_tokens": ELECTRA,
        "distillation": ("--objective", "distillation", "--objective_options.teacher", str(teacher)),
    }
    assert_same_names(OBJECTIVES, {*options, "masked"}, "`options` of this test of each `pretraining_output`")
    for objective, more in options.items():
        train(
            json.dumps(mixture),
            tmp_path / objective,
            *more,
            "--train.max_steps",
            "1",
            "--masking.rate",
            "0.6",
            "--train.micro_batch_size",
            "1",
            "--model.hidden_dropout_prob",
            "0.1",
        )
        lines = [line for line in read_metrics(tmp_path / objective) if "train/loss" in line]
        assert {f"train/mlm_loss/{name}" for name in ("one", "two")} & lines[-1].keys()


def test_a_micro_batch_without_masks_is_no_filler_and_has_spans_of_nothing():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert [len(each) for each in spans(nothing)] == [0, 0, 0]
    assert is_real(nothing) and is_real(torch.tensor([-100, 3])) and not is_real(torch.tensor([-100, -100]))


def test_a_start_takes_no_part_of_another_objectives_parameters(data, tmp_path, capsys):
    span = ("--objective", "span_boundary", "--train.max_steps", "1", "--schedule.warmup_steps", "1")
    train(data, tmp_path / "first", *span, "--objective_options.longest", "10")
    said = train(data, tmp_path / "second", *span, "--init_from", str(tmp_path / "first"))
    assert "initialized" in said and "boundary_positions.weight" in said
    moments = (*span, "--init_from", str(tmp_path / "first"), "--init_optimizer", "true")
    said = error_of(capsys, *pretrain_arguments(data, tmp_path / "third", *moments))
    assert "init_optimizer: found a run that trains boundary_positions.weight" in said
