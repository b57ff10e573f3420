"""Vectors of texts: the loss over a whole global batch however it is split, its parity, and what reads the result."""

import json
import math
import random

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from cloze.launch.cli import main
from cloze.launch.config import ScheduleConfig
from cloze.launch.predict import Predictor
from cloze.launch.training.schedules import multiplier
from tests.forked import ForkedRun
from tests.launch.finetune.altered import exact_passes
from tests.launch.finetune.running import arguments, finetune, lines
from tests.launch.finetune.small import OTHERS, make_model, write_tsv
from tests.launching import assert_killed_equals_whole, assert_same_weights, curve, finish, weights

TRIPLES = ("--text_columns", "anchor", "positive", "negative")


def texts_like(rng: random.Random) -> tuple[str, str, str]:
    """A text, one of nearly the same words, and one that shares two of them."""
    words = rng.choices(OTHERS, k=rng.randint(3, 9))
    alike, other = list(words), rng.sample(words, 2) + rng.choices(OTHERS, k=3)
    rng.shuffle(alike)
    return " ".join(words), " ".join(alike[: max(2, len(alike) - 1)]), " ".join(other)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with rows to learn from, pairs that are held out, and pairs with scores."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    write_tsv(folder / "train.tsv", ("anchor", "positive", "negative"), [texts_like(rng) for _ in range(32)])
    write_tsv(folder / "pairs.tsv", ("anchor", "positive"), [texts_like(rng)[:2] for _ in range(17)])
    scored = [(texts_like(rng), rng.randrange(2)) for _ in range(21)]
    write_tsv(
        folder / "sts.tsv",
        ("sentence1", "sentence2", "score"),
        [(texts[0], texts[1 + other], 5 - 3 * other) for texts, other in scored],
    )
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model without dropout."""
    return make_model(tmp_path_factory.mktemp("plain"), dropout=0.0)


def embed(model, data, output, *overrides, validation="sts.tsv", processes=1):
    return finetune("embed", model, data / "train.tsv", data / validation, output, *overrides, processes=processes)


LOSSES = {
    "pairs": ((), 2, lambda encoder: MultipleNegativesRankingLoss(encoder)),
    "both directions": (
        ("--embedding.symmetric", "true", "--embedding.temperature", "0.1"),
        2,
        lambda encoder: MultipleNegativesRankingLoss(
            encoder, scale=10.0, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
    ),
    "sizes of triples": (
        (*TRIPLES, "--embedding.dimensions", "[8]"),
        3,
        lambda encoder: MatryoshkaLoss(encoder, MultipleNegativesRankingLoss(encoder), [32, 8]),
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses_and_weights_are_those_of_sentence_transformers(case, plain, data, tmp_path):
    """Ours in four micro-batches a step, theirs with the whole batch at once and an optimizer of plain torch."""
    options, columns, make_loss = LOSSES[case]
    embed(plain, data, tmp_path / "run", "--train.micro_batch_size", 2, "--seed", 5, "--epochs", 1.5, *options)
    ours = [line["train/loss"] for line in curve(tmp_path / "run") if "train/loss" in line]
    transformer = Transformer(str(plain))
    encoder = SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode="mean")], device="cpu").train()
    loss_of = make_loss(encoder)
    decays = [[p for p in encoder.parameters() if (p.dim() > 1) == many] for many in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": decays[0], "weight_decay": 0.01}, {"params": decays[1], "weight_decay": 0.0}], lr=1.0, eps=1e-6
    )
    rows = [line.split("\t") for line in (data / "train.tsv").read_text().splitlines()[1:]]
    order = np.concatenate(
        [
            np.random.Generator(np.random.PCG64(np.random.SeedSequence((5, 2, epoch, 0)))).permutation(len(rows))
            for epoch in range(2)
        ]
    )
    assert len(ours) == 6
    for step, ours_loss in enumerate(ours):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * multiplier(ScheduleConfig(warmup_share=0.1), step, len(ours))
        chosen = [rows[number] for number in order[step * 8 : step * 8 + 8]]
        loss = loss_of(
            [encoder.preprocess([row[column] for row in chosen]) for column in range(columns)], torch.zeros(8)
        )
        assert ours_loss == pytest.approx(loss.item(), abs=5e-5), step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    theirs = dict(encoder[0].auto_model.named_parameters())["encoder.layer.1.output.dense.weight"]
    made = weights(tmp_path / "run", 6)["bert.encoder.layers.1.feed_forward.down.weight"]
    assert (made - theirs).abs().max() < 5e-5


def test_any_split_into_ranks_and_micro_batches_learns_the_same(plain, data, tmp_path):
    """One pass over the whole batch against two passes over parts of it, on two ranks with partitioned weights too."""
    options = (*TRIPLES, "--embedding.symmetric", "true", "--embedding.dimensions", "[8]", "--epochs", 1)
    whole, _ = embed(plain, data, tmp_path / "whole", "--train.micro_batch_size", 8, *options)
    splits = {
        "single": (("--train.micro_batch_size", 1), 1),
        "ranks": (("--train.micro_batch_size", 2), 2),
        "partitioned": (("--train.micro_batch_size", 2, "--zero.stage", 3), 2),
    }
    for name, (split, processes) in splits.items():
        results, _ = embed(plain, data, tmp_path / name, *split, *options, processes=processes)
        assert results["validation"] == pytest.approx(whole["validation"], abs=1e-4), name
        assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / name), 1e-5)
        for line, other in zip(curve(tmp_path / "whole"), curve(tmp_path / name), strict=True):
            assert line.get("train/loss") == pytest.approx(other.get("train/loss"), abs=1e-5)
            assert line.get("train/accuracy") == pytest.approx(other.get("train/accuracy"))


def test_dropout_pairs_are_dropped_alike_in_both_passes_and_a_killed_run_ends_with_the_same_bits(model, data, tmp_path):
    options = ("--text_columns", "anchor", "--epochs", 4, "--checkpoint.every_steps", 3)
    words = [model, data / "train.tsv", data / "sts.tsv"]
    finish(ForkedRun(arguments("embed", *words, tmp_path / "undisturbed", *options), 1, exact_passes))
    again = arguments("embed", *words, tmp_path / "run", *options)
    assert_killed_equals_whole(tmp_path / "undisturbed", 10, again)


def test_16_bit_products_of_two_ranks(plain, data, tmp_path):
    found = {}
    for name, options in (("fp32", ()), ("bf16", ("--train.precision", "bf16", "--zero.stage", 2))):
        results, _ = embed(plain, data, tmp_path / name, *options, "--epochs", 1, processes=2)
        found[name] = [line["train/loss"] for line in curve(tmp_path / name) if "train/loss" in line]
    assert found["bf16"] == pytest.approx(found["fp32"], abs=0.15) and found["bf16"] != found["fp32"]


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_the_pooling_is_kept_and_sentence_transformers_gives_the_same_vectors(pooling, model, data, tmp_path, capsys):
    options = ("--pooling", pooling) if pooling != "mean" else ()
    results, _ = embed(model, data, tmp_path / "run", *options, "--train.max_steps", 3, "--max_length", 12)
    rows = [line.split("\t") for line in (data / "sts.tsv").read_text().splitlines()[1:]]
    texts, long = [text for row in rows for text in row[:2]], " ".join(OTHERS)
    ours = Predictor.from_folder(tmp_path / "run")
    with pytest.warns(UserWarning, match="10 tokens beyond the 12"):
        vectors = ours.embed([*texts, long])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    cosines = (vectors[:-1:2] * vectors[1:-1:2]).sum(1)
    assert results["validation"]["examples"] == len(rows)
    said = [each["prediction"] for each in lines(tmp_path / "run" / "predictions" / "validation.jsonl")]
    assert said == pytest.approx(cosines, abs=1e-5)
    spearman = spearmanr(said, [float(row[2]) for row in rows]).statistic
    assert results["validation"]["spearman"] == pytest.approx(spearman, abs=1e-9)
    assert ours.similarity(*texts[:2]) == pytest.approx(float(cosines[0]), abs=1e-5)

    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "hf")]) == 0
    theirs = SentenceTransformer(str(tmp_path / "hf"), device="cpu")
    np.testing.assert_allclose(theirs.encode([*texts, long]), vectors, atol=1e-5)
    assert "sentence-similarity" in (tmp_path / "hf" / "README.md").read_text()
    cut = SentenceTransformer(str(tmp_path / "hf"), device="cpu", truncate_dim=8).encode(
        texts, normalize_embeddings=True
    )
    np.testing.assert_allclose(Predictor.from_folder(tmp_path / "hf").embed(texts, dimensions=8), cut, atol=1e-5)
    capsys.readouterr()
    assert main(["predict", "embed", str(tmp_path / "run"), texts[0], "--dimensions", "8", "--format", "json"]) == 0
    np.testing.assert_allclose(json.loads(capsys.readouterr().out)["vector"], cut[0], atol=1e-5)
    # What is asked for by name is plain, as of any encoder; and who goes on from here goes on with the same pooling.
    other = {"cls": "max", "mean": "cls", "max": "mean"}[pooling]
    assert np.abs(np.linalg.norm(ours.embed(texts, pooling=other), axis=1) - 1).min() > 0.1
    if pooling == "cls":
        embed(tmp_path / "hf", data, tmp_path / "again", "--train.max_steps", 1)
        notes = json.loads((tmp_path / "again" / "model" / "config.json").read_text())
        assert notes["cloze_vectors"] == {"pooling": "cls", "normalize": True}


def test_pairs_that_are_held_out_find_each_other(model, data, tmp_path):
    """Measured on the whole file by hand; a hard negative of a test file joins what is found."""
    results, said = embed(
        model,
        data,
        tmp_path / "run",
        *TRIPLES,
        "--epochs",
        4,
        "--embedding.dimensions",
        "[16]",
        "--test",
        data / "train.tsv",
        validation="pairs.tsv",
    )
    assert results["metric"] == "ndcg_at_10" and "ndcg_at_10, recall_at_1, recall_at_5" in said
    model = Predictor.from_folder(tmp_path / "run")
    for file, split, columns in (("pairs.tsv", "validation", 2), ("train.tsv", "test/train", 3)):
        rows = [line.split("\t") for line in (data / file).read_text().splitlines()[1:]]
        documents = [row[column] for row in rows for column in range(1, columns)]
        for size, suffix in ((32, ""), (16, "/16")):
            scores = model.embed([row[0] for row in rows], dimensions=size) @ model.embed(documents, dimensions=size).T
            ranks = [1 + int((row > row[number * (columns - 1)]).sum()) for number, row in enumerate(scores)]
            expected = {f"recall_at_{most}": np.mean([rank <= most for rank in ranks]) for most in (1, 5, 10)}
            expected["ndcg_at_10"] = np.mean([1 / math.log2(1 + rank) if rank <= 10 else 0.0 for rank in ranks])
            for name, value in expected.items():
                assert results[split][name + suffix] == pytest.approx(value, abs=1e-9), (split, name, suffix)
        if split == "validation":
            said = lines(tmp_path / "run" / "predictions" / "validation.jsonl")
            ranks = [
                1 + int((row > row[number]).sum())
                for number, row in enumerate(model.embed([row[0] for row in rows]) @ model.embed(documents).T)
            ]
            assert {each["text"]: each["rank_error"] for each in said} == {
                row[0]: rank - 1 for row, rank in zip(rows, ranks, strict=True)
            }


ERRORS = {
    "no scores": (("--text_columns", "anchor"), "pairs.tsv", "found no column 'score' or 'relatedness_score'"),
    "score by name": (("--label_columns", "gold"), "sts.tsv", "expected one named 'gold'"),
    "columns of scores": (("--embedding.scored_columns", "[a, b]"), "sts.tsv", "--embedding.scored_columns"),
    "its own positive": (("--text_columns", "anchor", "anchor"), "pairs.tsv", "text_columns: found 'anchor' twice"),
    "a text with itself": (("--embedding.scored_columns", "[sentence1, sentence1]"), "sts.tsv", "'sentence1' twice"),
    "a score as text": (
        ("--embedding.scored_columns", "[sentence1, score]"),
        "sts.tsv",
        "label_columns: found 'score', which is read as text too",
    ),
    "a text as score": (("--label_columns", "positive"), "pairs.tsv", "found 'positive', which is read as text too"),
    "no positive": (("--text_columns", "anchor", "other"), "sts.tsv", "'other'"),
    "no dropout": (("--text_columns", "anchor", "--dropout", "0"), "sts.tsv", "dropout: found 0 with one column"),
    "size": (("--embedding.dimensions", "[32]"), "sts.tsv", "embedding.dimensions: found 32, expected less than 32"),
    "sizes": (("--embedding.dimensions", "[8, 8]"), "sts.tsv", "embedding.dimensions: found 8, 8"),
    "temperature": (("--embedding.temperature", "0"), "sts.tsv", "embedding.temperature: found 0.0"),
    "pooler": (("--pooling", "pooler"), "sts.tsv", "pooling: found pooler with the task embed"),
    "frozen": (("--freeze", "encoder"), "sts.tsv", "freeze: found encoder with the task embed"),
    "unfreezing": (("--unfreeze_every_epochs", "1"), "sts.tsv", "unfreeze_every_epochs: found 1"),
    "pieces": (("--keep", "tail"), "sts.tsv", "keep: found tail with the task embed"),
    "a batch of one": (
        ("--train.global_batch_size", "1", "--train.micro_batch_size", "1"),
        "sts.tsv",
        "train.global_batch_size: found 1",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_end_in_one_line_and_status_2(case, model, data, tmp_path, capsys):
    options, validation, part = ERRORS[case]
    status = main(
        [
            "finetune",
            "embed",
            "--model",
            str(model),
            "--train",
            str(data / "train.tsv"),
            "--validation",
            str(data / validation),
            "--output",
            str(tmp_path / "run"),
            "--max_length",
            "32",
            *options,
        ]
    )
    error = capsys.readouterr().err.strip()
    assert status == 2 and len(error.splitlines()) == 1 and part in error, error
    assert not (tmp_path / "run").exists()


def test_fields_of_vectors_are_refused_elsewhere(model, data, tmp_path, capsys):
    assert (
        main(
            [
                "finetune",
                "stsb",
                "--model",
                str(model),
                "--train",
                str(data / "sts.tsv"),
                "--validation",
                str(data / "sts.tsv"),
                "--output",
                str(tmp_path / "run"),
                "--embedding.symmetric",
                "true",
            ]
        )
        == 2
    )
    assert "embedding: found" in capsys.readouterr().err
    assert main(["predict", "embed", str(model), "w1", "--dimensions", "33"]) == 2
    assert "dimensions: found 33, expected 1 to 32" in capsys.readouterr().err
