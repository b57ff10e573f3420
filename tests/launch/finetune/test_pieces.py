"""Long texts in overlapping pieces, pooled: nothing is cut, and what decides may stand anywhere."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from cloze.launch.cli import main
from cloze.launch.predict.labels import Classify
from cloze.launch.predict.predictor import Predictor
from cloze.model.huggingface import load_head
from tests.launch.finetune.running import finetune, lines
from tests.launch.finetune.small import BAD, GOOD, OTHERS, write_tsv
from tests.launch.finetune.test_features import prepared


def long_texts(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """1 to 40 words, with one that decides anywhere among them: far beyond the 14 tokens of a piece."""
    rows = []
    for _ in range(count):
        words, label = rng.choices(OTHERS, k=rng.randint(1, 40)), rng.randrange(2)
        words.insert(rng.randrange(len(words) + 1), rng.choice(GOOD if label else BAD))
        rows.append((" ".join(words), str(label)))
    return rows


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_tsv(
        tmp_path_factory.mktemp("data") / "train.tsv", ("sentence", "label"), long_texts(random.Random(0), 48)
    )


@pytest.mark.parametrize("pooling", ["max", "mean", "attention"])
@pytest.mark.parametrize("read", [(), ("--read_layers", "weighted", "--pooling", "mean")])
def test_a_text_is_what_its_pieces_pooled_by_hand_say(model, file, pooling, read):
    ours, examples = prepared(
        "sst2",
        model,
        file,
        "--keep",
        "pieces",
        "--piece_pooling",
        pooling,
        "--max_length",
        "16",
        "--window_step",
        "5",
        *read,
    )
    reference, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    chosen = np.array([5, 0, 17, 3])
    with torch.no_grad():
        scores = ours(**examples.batch(chosen)).logits
        for number, score in zip(chosen, scores, strict=True):
            text = file.read_text().splitlines()[1 + number].split("\t")[0]
            ids, vectors, start = tokenizer(text, add_special_tokens=False)["input_ids"], [], 0
            while True:
                piece = torch.tensor([[2, *ids[start : start + 14], 3]])
                output = reference(piece, output_hidden_states=True)
                mixed = torch.stack(output.hidden_states[1:]).mean(0)[0]  # weights that have learned nothing are alike
                vectors.append(mixed.mean(0) if read else output.pooler_output[0])
                if start + 14 >= len(ids):
                    break
                start += 5
            vectors = torch.stack(vectors)
            if pooling == "attention":
                chances = ours.piece_attention(vectors)[:, 0].softmax(0)
                vector = (chances[:, None] * vectors).sum(0)
            else:
                vector = vectors.mean(0) if pooling == "mean" else vectors.amax(0)
            assert torch.allclose(score, ours.classifier(vector), atol=1e-5)


@pytest.mark.parametrize("pooling, freeze", [("attention", "none"), ("max", "encoder")])
def test_a_run_in_pieces_and_its_folder_say_the_same(model, file, tmp_path, pooling, freeze):
    results, said = finetune(
        "sst2",
        model,
        file,
        file,
        tmp_path / "run",
        "--keep",
        "pieces",
        "--piece_pooling",
        pooling,
        "--max_length",
        16,
        "--epochs",
        6,
        "--freeze",
        freeze,
    )
    assert "pieces, none cut" in said and results["validation"]["examples"] == 48
    head = load_head(tmp_path / "run" / "model")
    assert (head.pieces, head.piece_length, head.piece_step) == (pooling, 16, 7)
    predictor = Predictor.from_folder(tmp_path / "run")
    texts = [line.split("\t")[0] for line in file.read_text().splitlines()[1:]]
    ours = lines(tmp_path / "run" / "predictions" / "validation.jsonl")
    for expected, found in zip(ours, predictor.map(Classify(), texts), strict=True):
        chances = {label.label: label.score for label in found.labels}
        assert chances == pytest.approx(expected["probabilities"], abs=1e-5)
        assert found.cut_tokens == 0


@pytest.mark.parametrize(
    "task, options, said",
    [
        ("mrpc", (), "keep: found pieces with a pair of texts"),
        ("sst2", ("--window_step", "15"), "window_step: found 15, expected at most 14"),
        ("ner", (), "keep: found pieces with the task ner"),
        ("squad", (), "keep: found pieces with the task squad"),
    ],
)
def test_pieces_of_what_has_none_are_refused(model, file, tmp_path, capsys, task, options, said):
    assert (
        main(
            [
                "finetune",
                task,
                "--model",
                str(model),
                "--train",
                str(file),
                "--validation",
                str(file),
                "--output",
                str(tmp_path / "run"),
                "--keep",
                "pieces",
                "--max_length",
                "16",
                *options,
            ]
        )
        == 2
    )
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1
