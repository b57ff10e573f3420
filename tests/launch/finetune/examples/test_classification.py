"""Classes, numbers and labels of texts: against transformers, in every format, over processes and kills."""

import datetime
import gzip
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from sklearn.dummy import DummyClassifier
from sklearn.metrics import f1_score
from tokenizers import Tokenizer as PlainTokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TextClassificationPipeline

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.config import FinetuneConfig
from cloze.launch.finetune.examples.classification import _label_set, has_labels, predicted
from cloze.launch.finetune.job import read_examples, read_job
from cloze.launch.finetune.tasks import TASKS, find_task
from cloze.launch.pretrained.source import find_source
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.texts.encoding import TextEncoder
from cloze.launch.texts.sequences import build_sequences
from cloze.launch.texts.settings import Truncation
from cloze.launch.texts.tables import Table, TableRow
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import byte_tokenizer
from tests.forked import ForkedRun
from tests.launch.finetune.running import arguments, finetune, lines
from tests.launch.finetune.small import BAD, GOOD, sentence, sentiment, write_tsv
from tests.launching import assert_same_run, assert_same_weights, finish, kill_at, resume, weights


@pytest.fixture(scope="module")
def sentiment_run(model, files, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "sst2"
    return output, finetune("sst2", model, *files, output, "--epochs", 8, "--test", files[1])[0]


def test_it_learns_and_says_so(sentiment_run):
    output, results = sentiment_run
    assert results["validation"]["accuracy"] > 0.85 and results["validation"]["examples"] == 21
    measured = [line for line in read_metrics(output) if "validation/accuracy" in line]
    assert len(measured) >= 8 and measured[0]["validation/accuracy"] < 0.8
    assert results["test/dev"] == results["validation"]
    labels = [each["label"] for each in lines(output / "predictions" / "validation.jsonl")]
    assert results["majority"] == {"accuracy": DummyClassifier().fit(labels, labels).score(labels, labels)}


def test_transformers_loads_what_was_made_and_answers_alike(sentiment_run, files):
    output, results = sentiment_run
    reference, report = AutoModelForSequenceClassification.from_pretrained(output / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert reference.config.id2label == {0: "0", 1: "1"} and reference.config.finetuning_task == "sst2"
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert reference.config.tokenizer_fingerprint == Tokenizer.from_folder(output / "model").fingerprint
    answer = TextClassificationPipeline(model=reference, tokenizer=tokenizer, device="cpu")
    rows = [line.split("\t") for line in files[1].read_text().splitlines()[1:]]
    predictions = lines(output / "predictions" / "validation.jsonl")
    assert len(predictions) == len(rows)
    for (text, label), ours in zip(rows, predictions, strict=True):
        theirs = answer(text)[0]
        assert (ours["prediction"], ours["label"]) == (theirs["label"], label)
        assert ours["probabilities"][theirs["label"]] == pytest.approx(theirs["score"], abs=1e-5)
    guessed, true = ([int(each[name]) for each in predictions] for name in ("prediction", "label"))
    assert results["validation"]["accuracy"] == np.mean(np.array(guessed) == true)


def test_processes_share_each_row_once_and_end_alike(model, files, tmp_path):
    """Two processes against one, dropout 0, 21 validation rows: an odd count, and a last round that one rank misses."""
    options = ("--dropout", 0, "--epochs", 2)
    one, _ = finetune("sst2", model, *files, tmp_path / "one", *options)
    two, _ = finetune("sst2", model, *files, tmp_path / "two", *options, processes=2)
    assert two["validation"]["examples"] == 21
    assert two["validation"] == pytest.approx(one["validation"], abs=1e-4)
    assert len(lines(tmp_path / "two" / "predictions" / "validation.jsonl")) == 21
    assert_same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"), 1e-5)


def test_killed_and_started_again_it_ends_with_the_same_bits(model, files, tmp_path):
    options = ("--epochs", 3, "--checkpoint.every_steps", 7)
    finetune("sst2", model, *files, tmp_path / "undisturbed", *options)
    again = arguments("sst2", model, *files, tmp_path / "run", *options)
    kill_at(18, again)
    content, path = files[1].read_bytes(), tmp_path / "other.tsv"
    path.write_bytes(content + content.splitlines(keepends=True)[-1])
    other = finish(ForkedRun(arguments("sst2", model, files[0], path, tmp_path / "run", *options)), status=2)
    assert "whose validation_hash is" in other, "the best checkpoint was chosen by other examples"
    resume(again)
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == json.loads(
        (tmp_path / "undisturbed" / "results.json").read_text()
    )


@pytest.mark.parametrize(
    "keep, kept", [("head", [0, 1, 2, 3, 4, 5]), ("tail", [4, 5, 6, 7, 8, 9]), ("head_tail", [0, 1, 6, 7, 8, 9])]
)
def test_what_stays_of_a_long_text(model, keep, kept):
    tokenizer = Tokenizer.from_folder(model)
    words = [f"w{number}" for number in range(10)]
    sequences, cut = build_sequences(tokenizer, [" ".join(words), "w1"], None, Truncation(8, keep, 2))
    ids = tokenizer.encode(" ".join(words[number] for number in kept))
    assert sequences.input_ids[1:7].tolist() == ids and sequences.lengths.tolist() == [8, 3]
    assert (cut.sequences, cut.tokens) == (1, 4)


def test_head_and_tail_are_128_and_382_tokens_by_default():
    config = parse(
        "finetune",
        ["sst2", "--model", "m", "--train", "t", "--validation", "v", "--output", "o", "--keep", "head_tail"],
    )
    resolved = config.for_task(find_task("sst2"), 512)
    assert (resolved.head_tokens, resolved.max_length - 2 - resolved.head_tokens) == (128, 382)
    with pytest.raises(UserError, match="head_tokens: found 128 with max_length 128, expected less than 126"):
        config.for_task(find_task("sst2"), 128)


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_training_and_predicting_cut_as_tokenizers_does(model, tmp_path, kind):
    """Rooms odd and even, sides of equal length and not, heads and tails; a text alone, too."""
    if kind == "bytes":
        byte_tokenizer([" ".join(f"w{n}" for n in range(20))] * 3).save(tmp_path)
    folder = model if kind == "words" else tmp_path
    plain, tokenizer = PlainTokenizer.from_file(str(folder / "tokenizer.json")), Tokenizer.from_folder(folder)
    lengths = [(a, b) for a in range(0, 12) for b in range(0, 12)]
    first, second = ([" ".join(f"w{n}" for n in range(pair[side])) for pair in lengths] for side in (0, 1))
    for room, keep, others in itertools.product((7, 8), ("head", "tail"), (second, None)):
        longest = room + (2 if others is None else 3)
        sequences, _ = build_sequences(tokenizer, first, others, Truncation(longest, keep))
        encoder = TextEncoder(tokenizer, 512, truncation=Truncation(longest, keep))
        plain.enable_truncation(longest, strategy="longest_first", direction="left" if keep == "tail" else "right")
        for row, texts in enumerate(zip(first, others or first, strict=True)):
            texts = texts if others else texts[:1]
            theirs = plain.encode(*texts)
            ids = sequences.input_ids[sequences.offsets[row] : sequences.offsets[row + 1]]
            assert ids.tolist() == theirs.ids, (lengths[row], room, keep)
            assert sequences.segment_b_start[row] == (theirs.type_ids.index(1) if others else len(ids))
            if all(texts):
                ours = encoder.encode(*texts, cut=True)
                assert (ours.ids, ours.segments) == (theirs.ids, theirs.type_ids)
                assert [end for _, end in ours.offsets] == [end for _, end in theirs.offsets]  # begins: without a space
                whole = 1 + sum(len(tokenizer.encode(text)) + 1 for text in texts)
                assert ours.cut_tokens == whole - len(ids)


def read(task, model, train, *overrides):
    """The job that a command would do on one file, read."""
    arguments = [
        task,
        "--model",
        str(model),
        "--train",
        str(train),
        "--validation",
        str(train),
        "--output",
        "o",
        *map(str, overrides),
    ]
    config: FinetuneConfig = parse("finetune", arguments).for_task(find_task(task), 64)
    return read_examples(config, find_task(task), find_source(config).tokenizer)


# First lines as in the files of gluebenchmark.com and of SICK, with the row's texts and label in their places.
GLUE = {
    "cola": ((), ("gj04", "1", "", "w1 w2"), 1),
    "sst2": (("sentence", "label"), ("w1 w2", "0"), 0),
    "mrpc": (("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"), ("1", "7", "8", 'w1 "w2', "w3"), 1),
    "stsb": (
        ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"),
        ("0", "g", "f", "y", "1", "n", "n", "w1", "w2", "3.25"),
        3.25,
    ),
    "qqp": (("id", "qid1", "qid2", "question1", "question2", "is_duplicate"), ("0", "1", "2", "w1 ?", "w2 ?", "1"), 1),
    "mnli": (
        (
            "index",
            "promptID",
            "pairID",
            "genre",
            "sentence1_binary_parse",
            "sentence2_binary_parse",
            "sentence1_parse",
            "sentence2_parse",
            "sentence1",
            "sentence2",
            "label1",
            "gold_label",
        ),
        ("0", "1", "1n", "f", "( w1 )", "( w2 )", "(R w1)", "(R w2)", "w1", "w2", "neutral", "neutral"),
        2,
    ),
    "qnli": (("index", "question", "sentence", "label"), ("0", "w1 ?", "w2", "not_entailment"), 1),
    "rte": (("index", "sentence1", "sentence2", "label"), ("0", "w1", "w2", "entailment"), 0),
    "wnli": (("index", "sentence1", "sentence2", "label"), ("0", "w1", "w2", "1"), 1),
    "sick-entailment": (
        ("pair_ID", "sentence_A", "sentence_B", "relatedness_score", "entailment_judgment"),
        ("1", "w1", "w2", "4.5", "NEUTRAL"),
        2,
    ),
    "sick-relatedness": (
        ("pair_ID", "sentence_A", "sentence_B", "relatedness_score", "entailment_judgment"),
        ("1", "w1", "w2", "4.5", "NEUTRAL"),
        4.5,
    ),
}


@pytest.mark.parametrize("task", GLUE)
def test_known_files_are_read_by_name(model, tmp_path, task):
    header, row, label = GLUE[task]
    _, head, train, _, _ = read(task, model, write_tsv(tmp_path / "train.tsv", header, [row, row]))
    assert len(train) == 2 and train.targets(np.array([0]))["labels"].flatten().tolist() == [label]
    assert len(TASKS[task].texts) == 1 or (train.batch(np.array([0]))["token_type_ids"] == 1).any()
    assert head.problem == ("regression" if isinstance(label, float) else "single_label")


@pytest.mark.parametrize(
    ("column", "labels", "found"),
    [
        ("label", [b"a", b"b"], "found b'a' in column 'label', expected a label"),
        ("label", [1.0, float("nan")], "row 2: found no label in column 'label'"),
        ("label", ["a", " "], "row 2: found no label in column 'label'"),
        ("labels", [[b"a"], [b"b"]], r"found \[b'a'\] in column 'labels', expected texts in it"),
    ],
)
def test_bytes_and_missing_numbers_of_parquet_are_no_labels(model, tmp_path, column, labels, found):
    """They were classes by the names that Python writes them with."""
    task = "multi-label" if column == "labels" else "classification"
    parquet.write_table(pa.table({"text": ["w1", "w2"], column: labels}), tmp_path / "data.parquet")
    with pytest.raises(UserError, match=found):
        read(task, model, tmp_path / "data.parquet")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_own_tables_with_named_columns(model, tmp_path, kind):
    rows = [{"review": "w1, w2", "stars": "good"}, {"review": "w3", "stars": "bad"}]
    path = tmp_path / f"own.{kind}"
    if kind == "csv":
        path.write_text('review,stars\n"w1, w2",good\nw3,bad\n')
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import polars

        polars.DataFrame(rows).write_parquet(path)
    _, head, train, _, _ = read("classification", model, path, "--text_columns", "review", "--label_columns", "stars")
    assert head.labels == ("bad", "good") and train.targets(np.arange(2))["labels"].tolist() == [1, 0]
    assert train.lengths.tolist() == [5, 3]


def test_independent_labels_and_several_label_columns(model, tmp_path):
    rng = random.Random(1)
    rows = [
        (sentence(rng, rng.choice(GOOD)) + " " + sentence(rng, rng.choice(BAD)), "x,y" if n % 2 else "x", n % 3)
        for n in range(24)
    ]
    path = write_tsv(tmp_path / "train.tsv", ("text", "labels", "size"), rows)
    results, _ = finetune("multi-label", model, path, path, tmp_path / "labels", "--epochs", 1)
    predictions = lines(tmp_path / "labels" / "predictions" / "validation.jsonl")
    true = [["x" in each["label"], "y" in each["label"]] for each in predictions]
    guessed = [[each["probabilities"][name] > 0.5 for name in ("x", "y")] for each in predictions]
    assert results["validation"]["f1_micro"] == pytest.approx(f1_score(true, guessed, average="micro"))
    assert [each["label"] for each in predictions[:2]] == [["x"], ["x", "y"]]
    results, _ = finetune(
        "label-columns", model, path, path, tmp_path / "columns", "--label_columns", "labels", "size", "--epochs", 1
    )
    assert {"accuracy_labels", "accuracy_size", "accuracy_mean"} <= results["validation"].keys()
    (first, *_) = lines(tmp_path / "columns" / "predictions" / "validation.jsonl")
    assert first["label"] == {"labels": "x", "size": "0"}
    assert sum(first["probabilities"]["size"].values()) == pytest.approx(1.0)


def test_ways_to_adapt(sentiment_run, files, tmp_path):
    """From another task's model, with the encoder frozen, or its lower part, or its top drawn anew."""
    output, _ = sentiment_run
    before = {name: tensor for name, tensor in weights(output).items() if name.startswith("bert.")}
    finetune("sst2", output, *files, tmp_path / "frozen", "--freeze", "encoder", "--epochs", 1)
    after = weights(tmp_path / "frozen")
    best = weights(output, json.loads((output / "results.json").read_text())["best_step"])
    assert all(torch.equal(after[name], best[name]) for name in before if ".pooler." not in name)
    assert not torch.equal(after["classifier.weight"], best["classifier.weight"])
    finetune("sst2", output, *files, tmp_path / "below", "--freeze", "below_1", "--epochs", 1)
    after = weights(tmp_path / "below")
    assert torch.equal(
        after["bert.encoder.layers.0.feed_forward.up.weight"], best["bert.encoder.layers.0.feed_forward.up.weight"]
    )
    assert not torch.equal(
        after["bert.encoder.layers.1.feed_forward.up.weight"], best["bert.encoder.layers.1.feed_forward.up.weight"]
    )
    _, said = finetune("sst2", output, *files, tmp_path / "anew", "--reinitialize_layers", 1, "--epochs", 0.1)
    assert "initialized: the top 1 layers and the pooler" in said


def test_random_weights_of_a_shape_and_a_new_head_named(model, files, tmp_path):
    (tmp_path / "shape.yaml").write_text(
        "hidden_size: 32\nnum_hidden_layers: 1\nnum_attention_heads: 2\n"
        "intermediate_size: 64\nmax_position_embeddings: 64\n"
    )
    options = ("--tokenizer", model, "--epochs", 4)
    results, said = finetune("sst2", tmp_path / "shape.yaml", *files, tmp_path / "run", *options)
    assert f"measured with the checkpoint of step {results['best_step']} of {results['steps']}, the best by " in said
    assert results["validation"]["accuracy"] > 0.5
    _, said = finetune("sst2", model, *files, tmp_path / "new", "--epochs", 0.1)
    assert "initialized: classifier.weight, classifier.bias" in " ".join(said.replace("│", " ").split())


HEADER = ("sentence", "label")
ERRORS = {
    "unknown label": (
        "sst2",
        HEADER,
        [("w1", "0"), ("w2", "7")],
        (),
        ("row 3", "found the label '7', expected one of 2: 0, 1; fix the row, or name this label too"),
    ),
    "missing column": ("sst2", ("text", "label"), [("w1", "0")], (), ("'text', 'label'", "'sentence'", "text_columns")),
    "missing label column": ("sst2", ("sentence", "gold"), [("w1", "0")], (), ("'label'", "label_columns")),
    "wrong number of fields": ("sst2", HEADER, [("w1", "0", "x")], (), ("row 2", "found 3 fields", "expected 2")),
    "no number": ("regression", ("text", "label"), [("w1", "much")], (), ("row 2", "'much'", "expected a number")),
    "a label with a space": (
        "classification",
        ("text", "label"),
        [("w1", "a"), ("w2", "a ")],
        (),
        ("found the labels 'a' and 'a ', which look alike, expected one way to write each",),
    ),
    "another space": (
        "classification",
        ("text", "label"),
        [("w1", "New York"), ("w2", "New\u00a0York")],
        (),
        (r"found the labels 'New York' and 'New\xa0York', which look alike",),
    ),
    "an accent in two ways": (
        "classification",
        ("text", "label"),
        [("w1", "caf\u00e9"), ("w2", "cafe\u0301"), ("w3", "b")],
        (),
        (r"found the labels 'cafe\u0301' and 'caf\xe9', which look alike",),
    ),
    "one label only": ("classification", ("text", "label"), [("w1", "a")], (), ("found 1 label",)),
    "no rows": ("sst2", HEADER, [], (), ("found no rows",)),
    "unknown task": ("sst3", HEADER, [("w1", "0")], (), ("'sst3'", "did you mean sst2?")),
    "too long": ("sst2", HEADER, [("w1", "0")], ("--max_length", "65"), ("max_length", "64")),
    "no model": ("sst2", HEADER, [("w1", "0")], ("--model", "no/where", "--offline", "true"), ("no/where", "offline")),
    "freeze": ("sst2", HEADER, [("w1", "0")], ("--freeze", "all"), ("freeze", "below_2")),
    "freeze below no number": ("sst2", HEADER, [("w1", "0")], ("--freeze", "below_²"), ("freeze: found 'below_²'",)),
    "memory": (
        "sst2",
        HEADER,
        [("w1", "0")],
        ("--train.memory_limit_gib", "1"),
        ("memory_limit_gib: found 1.0", "it is for pretraining"),
    ),
    "projector": ("sst2", HEADER, [("w1", "0")], ("--monitor.embeddings", "true"), ("monitor.embeddings: found True",)),
    "no step": ("sst2", HEADER, [("w1", "0")], ("--model_step", "4"), ("model_step: found 4", "a run of pretraining")),
    "metric": ("sst2", HEADER, [("w1", "0")], ("--epochs", "0"), ("epochs", "above 0")),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_end_in_one_line_and_status_2(model, tmp_path, capsys, case):
    task, header, rows, options, parts = ERRORS[case]
    path = write_tsv(tmp_path / "data.tsv", header, rows)
    status = main(
        [
            "finetune",
            task,
            "--model",
            str(model),
            "--train",
            str(path),
            "--validation",
            str(path),
            "--output",
            str(tmp_path / "run"),
            *options,
        ]
    )
    error = capsys.readouterr().err.strip()
    assert status == 2 and len(error.splitlines()) == 1, error
    for part in (*parts, *(["data.tsv"] if "row" in parts[0] else [])):
        assert part in error, error
    assert not (tmp_path / "run").exists()


LINES = {
    "no label in a row": (
        "classification",
        ['{"text": "w1", "label": "a"}', '{"text": "w2"}'],
        (),
        ("row 2", "found no label in column 'label'"),
    ),
    "label null": (
        "classification",
        ['{"text": "w1", "label": "a"}', '{"text": "w2", "label": null}'],
        (),
        ("row 2", "found no label"),
    ),
    "no text in a row": (
        "classification",
        ['{"text": "w1", "label": "a"}', '{"label": "b"}'],
        (),
        ("row 2", "found None in column 'text'"),
    ),
    "text a number": (
        "classification",
        ['{"text": 3, "label": "a"}', '{"text": "w", "label": "b"}'],
        (),
        ("row 1", "found 3 in column 'text'"),
    ),
    "no list of labels": (
        "multi-label",
        ['{"text": "w1", "labels": ["a"]}', '{"text": "w2"}'],
        (),
        ("row 2", "found nothing in column 'labels'"),
    ),
    "a list for a label": ("classification", ['{"text": "w", "label": ["a"]}'], (), ("row 1: found ['a'] in column",)),
    "no text among labels": (
        "multi-label",
        ['{"text": "w", "labels": ["a", null]}'],
        (),
        ("row 1: found ['a', None] in column 'labels', expected texts in it",),
    ),
    "a number above all floats": ("regression", [f'{{"text": "w", "label": {"1" * 400}}}'], (), ("row 1", "a number")),
    "a square above fp32": ("regression", ['{"text": "w", "label": 2e19}'], (), ("row 1: found 2e+19", "a number")),
    "digits of another script": ("regression", ['{"text": "w", "label": "٣"}'], (), ("row 1: found '٣'", "a number")),
    "a boolean for a number": ("regression", ['{"text": "w", "label": true}'], (), ("row 1: found True", "a number")),
    "Python's form of a number": ("regression", ['{"text": "w", "label": "1_0"}'], (), ("row 1: found '1_0'",)),
    "labels a number": ("multi-label", ['{"text": "w1", "labels": 3}'], (), ("row 1", "found 3 in column 'labels'")),
    "broken JSON": ("classification", ['{"text": "w1", "label": "a"}', '{"text": '], (), ("row 2", "JSON")),
    "no object": ("classification", ['["w1", "a"]'], (), ("row 1", "found list")),
    "half an emoji": (
        "classification",
        ['{"text": "w1 \\ud83d\\ude00", "label": "a"}', '{"text": "w2 \\ud83d"}'],
        (),
        ("row 2", r"found '\ud83d', half of a character"),
    ),
    "half an emoji as a label": ("multi-label", ['{"text": "w1", "labels": ["\\ud83d"]}'], (), ("row 1", r"'\ud83d'")),
    "half an emoji in SQuAD": (
        "squad",
        ['{"data": [{"paragraphs": [{"context": "\\ud83d", "qas": []}]}]}'],
        (),
        ("data.jsonl", r"'\ud83d'"),
    ),
    "choices and labels": (
        "swag",
        ['{"sent1": "w", "sent2": "w", "ending0": "w", "ending1": "w", "label": 0}'],
        ("--choice_columns", "ending0", "ending1"),
        ("choice_columns: found 2", "4 labels"),
    ),
    "two right choices": ("swag", ['{"label": 0}'], ("--label_columns", "a", "b"), ("label_columns: found a, b",)),
    "label alone": (
        "classification",
        ['{"text": "w", "label": "a"}'],
        ("--labels", "a"),
        ("labels: found a alone, expected at least two; name all classes",),
    ),
    "three classes of F1": (
        "mrpc",
        ['{"#1 String": "w", "#2 String": "w", "Quality": "0"}'],
        ("--labels", "0", "1", "2"),
        ("labels: found 3, expected the two classes of Quality", "pair-classification"),
    ),
    "not in the list": (
        "classification",
        ['{"text": "w", "label": "a"}', '{"text": "w", "label": "c"}'],
        ("--labels", "a", "b"),
        ("row 2: found the label 'c', expected one of 2: a, b; fix the row, or name this label too in a list of all",),
    ),
    "no choice": (
        "swag",
        ['{"sent1": "w", "sent2": "w", "ending0": "w", "ending1": "w", "ending2": "w", "ending3": "w", "label": 4}'],
        (),
        ("row 1: found the label '4', expected one of 4: 0, 1, 2, 3; fix the row, or name the label of each choice",),
    ),
    "label twice": ("classification", ['{"text": "w", "label": "a"}'], ("--labels", "a", "a"), ("labels: found a, a",)),
    "text as its label": (
        "classification",
        ['{"text": "w", "label": "a"}'],
        ("--text_columns", "text", "label"),
        ("label_columns: found 'label', which is read as text too, expected another column",),
    ),
    "text beside itself": (
        "pair-classification",
        ['{"text": "w", "label": "a"}'],
        ("--text_columns", "text", "text"),
        ("text_columns: found 'text' twice",),
    ),
    "columns of tags": ("ner", [""], ("--text_columns", "a"), ("text_columns: found ['a'] with the task ner",)),
    "labels that are columns": (
        "multi-label",
        ['{"text": "w", "a": 1, "b": 0}'],
        ("--label_columns", "a", "b", "--labels", "c", "d"),
        ("labels: found c, d with the label columns a, b",),
    ),
    "labels of numbers": ("regression", [""], ("--labels", "a", "b"), ("labels: found ['a', 'b'] with the task",)),
    "units of classes": ("sst2", [""], ("--answer_units", "characters"), ("answer_units: found characters",)),
    "malformed SQuAD": ("squad", [""], ("--skip_malformed_rows", "true"), ("skip_malformed_rows: found True",)),
}


@pytest.mark.parametrize("case", LINES)
def test_wrong_rows_and_fields_that_a_task_does_not_read_end_in_one_line(model, tmp_path, capsys, case):
    task, rows, options, parts = LINES[case]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(rows) + "\n")
    status = main(
        [
            "finetune",
            task,
            "--model",
            str(model),
            "--train",
            str(path),
            "--validation",
            str(path),
            "--output",
            str(tmp_path / "run"),
            "--max_length",
            "32",
            *options,
        ]
    )
    error = capsys.readouterr().err.strip()
    assert status == 2 and len(error.splitlines()) == 1, error
    for part in (*parts, *(["data.jsonl"] if parts[0].startswith("row ") else [])):
        assert part in error, error


@pytest.mark.parametrize("damage", ["flipped", "cut", "no gzip"])
def test_a_damaged_gzip_file_is_named(model, tmp_path, damage):
    rows = "text\tlabel\n" + "".join(f"w{n % 20} w{n % 7}\t{n % 2}\n" for n in range(500))
    whole = gzip.compress(rows.encode())
    data = {"flipped": whole[:40] + bytes([whole[40] ^ 255]) + whole[41:], "cut": whole[:-40], "no gzip": rows.encode()}
    (tmp_path / "train.tsv.gz").write_bytes(data[damage])
    with pytest.raises(UserError, match="train.tsv.gz: found a damaged gzip file"):
        read("classification", model, tmp_path / "train.tsv.gz")


def test_a_column_named_twice_is_refused_and_long_fields_are_read(model, tmp_path):
    (tmp_path / "twice.csv").write_text("text,label,text\nw1,a,w2\n")
    with pytest.raises(UserError, match="row 1: found the columns text, label, text"):
        read("classification", model, tmp_path / "twice.csv")
    (tmp_path / "long.csv").write_text("text,label\n" + "w1 " * 60_000 + ",a\nw2,b\n")
    _, _, train, _, _ = read("classification", model, tmp_path / "long.csv")
    assert train.lengths.tolist() == [64, 3]


def test_another_tokenizer_is_refused(sentiment_run, files, tmp_path, capsys):
    output, _ = sentiment_run
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nw1\n")
    status = main(
        [
            "finetune",
            "sst2",
            "--model",
            str(output),
            "--tokenizer",
            str(tmp_path / "other"),
            "--train",
            str(files[0]),
            "--validation",
            str(files[1]),
            "--output",
            str(tmp_path / "run"),
        ]
    )
    error = capsys.readouterr().err
    assert status == 2 and "fingerprint" in error and "leave --tokenizer out" in error


def test_other_columns_of_a_prediction_are_values_of_json():
    """As those beside the results of `cloze predict`."""
    row = TableRow(
        {"hash": b"\xff\x00", "map": [("a", math.nan)], "day": datetime.date(2026, 1, 2)}, "a.parquet: row 1"
    )
    expected = {"hash": "/wA=", "map": [{"key": "a", "value": None}], "day": "2026-01-02"}
    assert predicted(row, {"prediction": "x"}) == {"place": "row 1"} | expected | {"prediction": "x"}


def test_the_entries_of_a_prediction_come_last_and_in_one_order():
    """Also where the table has columns of their names."""
    row = TableRow({"prediction": "old", "text": "a", "place": "x", "label": "b"}, "dev.csv: row 2")
    found = predicted(row, {"prediction": "b", "probabilities": {"b": 1.0}})
    assert list(found.items()) == [
        ("place", "row 2"),
        ("text", "a"),
        ("prediction", "b"),
        ("probabilities", {"b": 1.0}),
    ]


def test_independent_labels_in_a_cell():
    """A list as JSON, as predictions are written, or words with commas; a bracket begins JSON."""
    in_json = ('["b", "a"]', ["b", "a"]), ("[]", []), (' ["b"]', ["b"])
    honest = (
        ("y, [x]", ["y", "[x]"]),
        ("joy :(,:(, don't", ["joy :(", ":(", "don't"]),
        ("a ('90s),b ('80s)", ["a ('90s)", "b ('80s)"]),
    )
    for cell, expected in (*in_json, ("b, a", ["b", "a"]), *honest):
        assert _label_set(TableRow({"labels": cell}, "row 2"), "labels") == expected
    for cell in ('["a", " "]', ["a", ""]):
        with pytest.raises(UserError, match="row 2: found an empty label in column 'labels'"):
            _label_set(TableRow({"labels": cell}, "row 2"), "labels")
    lists = ("['a', 'b']", '["a", "b"', "[x], y", "['a' 'b']", '["a\\ud83d"]', "('a', 'b')", "{'a'}", '{"a": 1}')
    printed = ("frozenset({'a'})", "Index(['a'], dtype='object')", "{a,b}", "{a}", "(3, 5)", "tensor([3, 5])")
    printed += ("{b'a'}", "(u'a', u'b')", '"a", "b"]', '"a, b"', "List(a, b)", "{0: 'a'}")
    for cell in (*lists, *printed, '"[\\"a\\"]"'):
        with pytest.raises(UserError, match="row 2: found .* in column 'labels', expected a list in JSON after"):
            _label_set(TableRow({"labels": cell}, "row 2"), "labels")


def test_labels_are_found_in_their_order(model, tmp_path):
    rows = [(text, str(int(label) + 9)) for text, label in sentiment(random.Random(0), 12)] + [("w1", "2")]
    _, head, _, _, _ = read("classification", model, write_tsv(tmp_path / "t.tsv", ("text", "label"), rows))
    assert head.labels == ("2", "9", "10")
    equal = ["1", "0001", "01", "00001", "001", "0"]  # of equal value: a set's order is each process's own
    rows = [("w1", label) for label in equal]
    _, head, _, _, _ = read("classification", model, write_tsv(tmp_path / "equal.tsv", ("text", "label"), rows))
    assert head.labels == ("0", "00001", "0001", "001", "01", "1")


def test_minus_one_is_a_label_where_the_model_has_it_and_empty_texts_are_counted(model, tmp_path):
    rows = [{"text": text, "label": label} for text, label in (("w1", "-1"), ("", "1"), ("w2 [SEP] w3", "-1"))]

    def read(name, rows):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        words = ["classification", "--model", str(model), "--train", str(train), "--validation", str(train)]
        words += ["--test", str(path), "--output", str(tmp_path / "o")]
        return read_job(parse("finetune", words))

    train = tmp_path / "train.jsonl"
    train.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = read("negative", rows[:1])
    assert job.test[0].labelled and job.train.facts.startswith(
        "3 rows (1 with an empty text, 1 that spell a special token), "
    )
    assert job.test[0].facts.startswith("1 rows, ")


@pytest.mark.parametrize("unknown", [None, "", -1, "-1"])
def test_a_file_without_labels_has_none_whatever_a_class_is_called(unknown):
    """A null is no label, although its text may be one's name."""
    table = Table(Path("t"), ("text", "label"), [TableRow({"text": "w1", "label": unknown}, "t: row 1")])
    assert not has_labels(table, ("label",), ("None", "Bug"))
    assert has_labels(table, ("label",), ("None", "-1")) == (unknown in (-1, "-1"))


def test_minus_one_is_a_label_of_a_column_of_several_too(model, tmp_path):
    def path(name: str, values) -> str:
        rows = [("w1", value, "x") for value in values]
        return str(write_tsv(tmp_path / name, ("text", "mood", "kind"), rows))

    train, test = path("train.tsv", ("-1", "0", "1")), path("test.tsv", ("-1", "-1"))
    words = ["label-columns", "--model", str(model), "--train", train, "--validation", train, "--test", test]
    job = read_job(parse("finetune", [*words, "--label_columns", "mood", "kind", "--output", str(tmp_path / "o")]))
    assert job.test[0].labelled


def test_labels_of_which_no_row_has_any_are_missed_by_file(model, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"text": "w1", "labels": []}) + "\n")
    with pytest.raises(UserError, match=r"t.jsonl: found no label in column 'labels' of any row, expected some; name"):
        read("multi-label", model, path)
