"""What a server says of its model."""

import json

import pytest

from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.serve.description import describe
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.launch.tiny_models import TAGS, labels, save_model
from tests.synthetic import NAMES


def test_a_model_without_labels(offline):
    found = describe(offline, "us/small")
    assert found == {
        "model": "us/small",
        "class": "BertForPreTraining",
        "revision": None,
        "labels": [],
        "operations": offline.abilities(),
        "pairs": "maybe",
        "columns": [],
        "examples": [{"text": "The capital of [MASK] is Paris.", "second": None, "title": None}],
    }


def test_a_text_with_a_blank_is_one_whose_words_the_vocabulary_has(offline, tmp_path):
    """What is unknown or cut into letters shows nothing of a model."""
    letters = ["c", "##a", "##p", "##i", "##t", "##l", "p", "##r", "##s"]
    amino_acids = ["a", "c", "d", "e", "##m"]
    for words, expected in (
        (["this", "is", "the", "of", *letters, "."], ["This is the [MASK]."]),
        (["x", "das", "##t", "haus", "ist", "rot"], ["das haus [MASK] ist"]),
        (amino_acids, ["a c [MASK] d"]),
        (["a"], ["a [MASK]"]),
        (["1"], []),
    ):
        names = {name: number for number, name in enumerate([*NAMES.values(), *words])}
        ours = Tokenizer(wordpiece_backend(names, NAMES, True, None), NAMES)
        found = describe(Predictor.from_folder(save_model(tmp_path / "".join(words), ours=ours)), "m")["examples"]
        assert [each["text"] for each in found] == expected


def test_rows_of_the_validation_file_are_shown_on_this_machine_only(tmp_path):
    folder = save_model(tmp_path / "model", "BertForSequenceClassification")
    note = json.loads((folder / "config.json").read_text()) | {"cloze_columns": {"texts": ["ticket"]}}
    (folder / "config.json").write_text(json.dumps(note))
    (tmp_path / "predictions").mkdir()  # as `cloze finetune` leaves them
    (tmp_path / "predictions/validation.jsonl").write_text('{"ticket": "no login"}\n')
    predictor = Predictor.from_folder(folder)
    assert [each["text"] for each in describe(predictor, "m", shows_rows=True)["examples"]] == ["no login"]
    assert describe(predictor, "m")["examples"] == []


@pytest.mark.parametrize("kind, named", [("BertForTokenClassification", TAGS), ("BertForQuestionAnswering", ())])
def test_the_labels_are_those_of_heads_that_have_some(tmp_path, kind, named):
    found = describe(Predictor.from_folder(save_model(tmp_path, kind, **labels(*(named or ("a", "b"))))), "m")
    assert found["labels"] == list(named)


def test_pairs_are_read_by_models_that_were_trained_on_them(tmp_path):
    folder = save_model(tmp_path / "snapshots" / "abc123", "BertForSequenceClassification")
    note = json.loads((folder / "config.json").read_text())
    for texts, expected in ((["a"], "never"), (["a", "b"], "always")):
        (folder / "config.json").write_text(json.dumps(note | {"cloze_columns": {"texts": texts}}))
        predictor = Predictor.from_folder(folder)
        assert predictor.loaded.revision == "abc123", "the commit of a hub model"
        assert (found := describe(predictor, "m"))["pairs"] == expected and found["columns"] == texts
    loaded = predictor.loaded
    loaded.encoder.pieces = (8, 4)  # of a long text, of which there is one
    assert describe(predictor, "m")["pairs"] == "never"
    assert LoadedModel(loaded.model, loaded.tokenizer).revision is None
