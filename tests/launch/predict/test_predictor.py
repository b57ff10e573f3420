"""Predictions against the pipelines (or, where there is none, the models) of transformers, on tiny random models."""

import numpy as np
import pytest

import cloze
from cloze.launch.predict.answers import AnswerQuestion
from cloze.launch.predict.blanks import FillMask
from cloze.launch.predict.predictor import Predictor, batches
from cloze.launch.predict.vectors import Compare, Embed
from cloze.pipeline.errors import UserError
from tests.launch.predict.asking import pipe, said_by
from tests.launch.tiny_models import save_model


def test_blanks_with_several_in_one_text_and_top_k(model, pretrained):
    theirs = pipe("fill-mask", pretrained, top_k=7)
    texts = ["the [MASK] sat on the mat .", "[MASK] sky is [MASK] and[MASK]blue"]
    for text, ours in zip(texts, model.map(FillMask(top_k=7), texts), strict=True):
        expected = theirs(text)
        expected = [expected] if isinstance(expected[0], dict) else expected
        assert len(ours) == text.count("[MASK]") == len(expected)
        for guesses, blank in zip(ours, expected, strict=True):
            assert [guess.token for guess in guesses] == [each["token_str"].replace(" ", "") for each in blank]
            np.testing.assert_allclose([g.probability for g in guesses], [e["score"] for e in blank], atol=2e-6)
    assert model.fill_mask(texts[0], top_k=7) == list(model.map(FillMask(top_k=7), texts[:1]))[0]


def test_any_number_of_texts_in_any_mixture_gives_what_each_gives_alone(model):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["cat", "walking", "[MASK]", "the", "é"], rng.integers(1, 20))) for _ in range(1500)]
    texts = [text if "[MASK]" in text else text + " [MASK]" for text in texts]
    together = list(model.map(FillMask(top_k=2), texts))
    for place in rng.choice(len(texts), 40, replace=False):
        alone = model.fill_mask(texts[place], top_k=2)
        assert [[g.token for g in blank] for blank in alone] == [[g.token for g in blank] for blank in together[place]]
    lengths = [int(length) for length in rng.integers(1, 600, 200)]
    found = list(batches(lengths))
    assert sorted(place for batch in found for place in batch) == list(range(200))
    assert all(len(batch) == 1 or sum(lengths[place] for place in batch) <= 4096 for batch in found)
    assert len(list(model.map(Embed(), []))) == 0


def test_what_cannot_be_answered_is_said_in_one_line(model, pretrained, tmp_path):
    long = "cat " * 60
    cases = [
        (lambda: model.fill_mask("no blank here"), "found no [MASK] in 'no blank here'"),
        (lambda: model.fill_mask("[MASK] " + long), "found 63 tokens, expected at most 48"),
        (lambda: model.score(long), "found 62 tokens, expected at most 48"),
        (lambda: model.features(long), "found 62 tokens"),
        (lambda: model.fill_mask(" \t"), "found an empty text"),
        (lambda: model.score("\u200b"), r"found an empty text ('\u200b')"),
        (lambda: model.similarity("a", "\x07"), r"found an empty text ('\x07')"),
        (lambda: model.classify("a", ""), "with the head for classify"),
        (lambda: model.tag("a"), "found a BertForPreTraining, expected a model with the head for tag; its operations"),
        (lambda: model.fill_mask("[MASK]", top_k=1000), "top_k: found 1000"),
        (lambda: model.fill_mask("[MASK]", top_k=0), "top_k: found 0"),
        (lambda: model.embed(["a"], layer=9), "layer: found 9, expected -4 to 3"),
        (lambda: list(model.map(Compare(), ["alone"])), "found one text, expected text and pair"),
    ]
    for call, expected in cases:
        with pytest.raises(UserError) as caught:
            call()
        assert expected in str(caught.value) and "\n" not in str(caught.value)
    save_model(tmp_path, "BertForQuestionAnswering")
    answering = Predictor.from_folder(tmp_path)
    with pytest.raises(UserError, match="leaves no room"):
        answering.answer("who " * 50, "the cat")
    with pytest.raises(UserError, match="found an empty text"):
        answering.answer("who", "\u200b")
    with pytest.raises(UserError, match="found one text, expected question and context"):
        list(answering.map(AnswerQuestion(), ["who"]))
    with pytest.raises(UserError, match="with the head for fill-mask; its operations are answer, similarity"):
        answering.fill_mask("[MASK]")


def test_models_that_python_names(pretrained, monkeypatch):
    for wrong in (None, 3, "", "  "):
        for load in (cloze.load, Predictor.from_folder):
            assert said_by(lambda load=load, wrong=wrong: load(wrong)).startswith(
                f"model: found {wrong!r}, expected the folder of a Cloze run"
            )
    monkeypatch.setenv("HOME", str(pretrained.parent))
    assert cloze.load(f"~/{pretrained.name}").loaded.source == str(pretrained)
    assert "~nobody-of-this-name/x" in said_by(lambda: cloze.load("~nobody-of-this-name/x"))
