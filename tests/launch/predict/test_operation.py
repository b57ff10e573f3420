"""What Python gives as options and texts."""

import numpy as np

from cloze.launch.predict.operation import Row
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.vectors import Embed
from tests.launch.predict.asking import said_by
from tests.launch.tiny_models import TAGS, labels, save_model


def test_options_of_another_kind_are_refused_by_name(model, pretrained, tmp_path):
    save_model(tmp_path, "BertForTokenClassification", **labels(*TAGS))
    tagger = Predictor.from_folder(tmp_path)
    names = "expected one of none, simple, first, average, max"
    for wrong in ("last", "Simple", None):
        said = said_by(lambda wrong=wrong: tagger.tag("a", aggregation=wrong))
        assert said == f"aggregation: found {wrong!r}, {names}"
    assert said_by(lambda: model.embed(["a"], pooling="avg")) == (
        "pooling: found 'avg', expected one of cls, mean, max or None"
    )
    assert said_by(lambda: model.similarity("a", "the", pooling="avg")).startswith("pooling: found 'avg'")
    assert said_by(lambda: model.fill_mask("[MASK]", top_k="3")) == "top_k: found '3', expected a whole number"
    assert said_by(lambda: model.embed(["a"], layer=True)) == "layer: found True, expected a whole number"
    assert said_by(lambda: model.word(3, ["a"])) == "word: found 3, expected text"
    np.testing.assert_array_equal(model.embed(["a"], layer=np.int64(1)), model.embed(["a"], layer=1))
    for wrong in ("newest", "3", 1.5, True):
        assert said_by(lambda wrong=wrong: Predictor.from_folder(pretrained, step=wrong)) == (
            f"step: found {wrong!r}, expected a whole number, 'best', or None for the newest good one"
        )
    assert "which is one model" in said_by(lambda: Predictor.from_folder(pretrained, step=3))


def test_texts_that_python_gives_are_checked_alike_everywhere(model, tmp_path):
    save_model(tmp_path, "BertForSequenceClassification", **labels("no", "yes"))
    classifier = Predictor.from_folder(tmp_path)
    methods = [model.embed, lambda texts: list(model.map(Embed(), texts)), classifier.classify]
    expected = "expected a text, or a pair of texts as a tuple of two"
    for method in methods:
        for wrong in (("a", "the", "cat"), ("a",), ("a", None), None, float("nan"), b"a", {"text": "a"}):
            said = said_by(lambda method=method, wrong=wrong: method(["a", wrong]))
            assert said == f"text 2: found {wrong!r}, {expected}"
        for wrong in ({"a": 1}, {"a"}, b"abc", None, 3, Row("a")):
            said = said_by(lambda method=method, wrong=wrong: method(wrong))
            assert said.startswith(f"texts: found {wrong!r}"[:40])
            assert said.endswith(f" of type {type(wrong).__name__}, expected a list of texts")
        assert said_by(lambda method=method: method(["a", "b", "  "])).startswith("text 3: found an empty text")
        assert len(method(text for text in ("a", "the cat"))) == len(method([("a", "the"), ["a", "b"]])) == 2
    for method in (*methods[:2], lambda text: model.word("the", text)):
        assert said_by(lambda method=method: method("abc")).startswith("texts: found one text, expected a list of them")
    assert said_by(lambda: model.fill_mask(["[MASK]"])) == f"text: found ['[MASK]'], {expected}"
    assert said_by(lambda: model.similarity("a", 3)) == f"text: found 3, {expected}"
    assert said_by(lambda: classifier.classify(["a", "b"], ["a", None])) == (f"text 2: found ('b', None), {expected}")
    assert said_by(lambda: classifier.classify(["a", "b"], {"a", "b"})).startswith("second texts: found {")
    save_model(tmp_path, "BertForMultipleChoice")
    chooser = Predictor.from_folder(tmp_path)
    assert said_by(lambda: chooser.choose("a", "bc")).startswith("choices: found one text, expected a list")
    assert said_by(lambda: chooser.choose("a", ["b", None])) == f"text: found None, {expected}"
