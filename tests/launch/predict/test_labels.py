"""Labels of texts and pairs, against transformers."""

import pytest

from cloze.launch.predict.labels import Classify
from cloze.launch.predict.predictor import Predictor
from cloze.launch.texts.encoding import TextEncoder
from tests.launch.predict.asking import TEXTS, pipe
from tests.launch.tiny_models import POSITIONS, labels, save_model, tokenizer


@pytest.mark.parametrize(
    "named", [labels("bad", "good", "so-so"), {}, {"num_labels": 1}], ids=["labels", "default labels", "one label"]
)
@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression", None])
def test_classes_of_texts_and_pairs(tmp_path, problem, named):
    if problem == "single_label_classification" and "num_labels" in named:
        pytest.skip("transformers makes no such model")
    save_model(tmp_path, "BertForSequenceClassification", problem_type=problem, **named)
    theirs, ours = pipe("text-classification", tmp_path, top_k=None), Predictor.from_folder(tmp_path)
    pairs = [*((text, None) for text in TEXTS), ("who ate an apple", "the man ate it"), ("a", "a " * 20)]
    results = list(ours.map(Classify(), [pair if pair[1] else pair[0] for pair in pairs]))
    for (text, pair), result in zip(pairs, results, strict=True):
        expected = theirs({"text": text, "text_pair": pair} if pair else text)
        expected = expected[0] if isinstance(expected[0], list) else expected
        scores = {each["label"]: each["score"] for each in expected}
        assert {label.label for label in result.labels} == scores.keys() and result.cut_tokens == 0
        for label in result.labels:
            # Numbers are sums of some size, of which either side has an error of up to 1e-5 against float64.
            tolerance = 5e-5 if problem == "regression" else 1e-5
            assert label.score == pytest.approx(scores[label.label], rel=1e-5, abs=tolerance)
        if problem != "regression":
            assert [label.label for label in result.labels] == [each["label"] for each in expected]
    assert len(ours.classify(TEXTS[0], top_k=1)) == 1


def test_long_texts_are_cut_counted_and_said(tmp_path):
    save_model(tmp_path, "BertForSequenceClassification")
    ours, theirs = Predictor.from_folder(tmp_path), pipe("text-classification", tmp_path, top_k=None)
    text = "the cat sat on the mat . " * 20
    (result,) = ours.map(Classify(), [text])
    assert result.cut_tokens == 20 * 7 + 2 - POSITIONS
    expected = theirs(text, truncation=True, max_length=POSITIONS)
    expected = expected[0] if isinstance(expected[0], list) else expected
    assert result.labels[0].score == pytest.approx(expected[0]["score"], abs=2e-6)
    with pytest.warns(UserWarning, match=f"{result.cut_tokens} tokens beyond"):
        ours.classify(text)
    encoder = TextEncoder(tokenizer(), 10)
    cut = encoder.encode("cat " * 9, "mat " * 3, cut=True)
    assert len(cut) == 10 and cut.parts.count(1) == 4 and cut.parts.count(2) == 3 and cut.cut_tokens == 5
