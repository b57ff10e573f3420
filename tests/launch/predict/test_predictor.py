"""Predictions against the pipelines (or, where there is none, the models) of transformers, on tiny random models."""

import numpy as np
import pytest
import torch
import transformers

import cloze
from cloze.launch.predict.answers import AnswerQuestion
from cloze.launch.predict.blanks import FillMask
from cloze.launch.predict.operation import Row
from cloze.launch.predict.predictor import Predictor, batches
from cloze.launch.predict.vectors import Compare, Embed, Features
from cloze.pipeline.errors import UserError
from tests.byte_level import byte_tokenizer
from tests.launch.tiny_models import POSITIONS, TAGS, labels, save_model

TEXTS = [
    "the cat sat on the mat .",
    "Walking to New newyork, the man bought milk!",
    "Who ate  an apple?",
    "é unknownword playing wab",
    "a",
    "the sky is blue and the sea is blue " * 4,
]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def model(pretrained):
    return Predictor.from_folder(pretrained)


def pipe(task: str, folder, **options):
    return transformers.pipeline(task, model=str(folder), tokenizer=str(folder), **options)


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


def test_features_are_those_of_the_pipeline(model, pretrained):
    theirs = pipe("feature-extraction", pretrained)
    for text, features in zip(TEXTS, model.map(Features(), TEXTS), strict=True):
        np.testing.assert_allclose(features.vectors, np.array(theirs(text)[0]), atol=2e-5)
        assert len(features.tokens) == len(features.offsets) == len(features.vectors)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
@pytest.mark.parametrize("layer", [-1, 0, 2, -2])
def test_embeddings_of_a_layer(model, pretrained, pooling, layer):
    reference = transformers.AutoModel.from_pretrained(pretrained).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(pretrained)
    vectors = model.embed(TEXTS, pooling=pooling, layer=layer)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 32)
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.no_grad():
            output = reference(**theirs(text, return_tensors="pt"), output_hidden_states=True)
        tokens = output.hidden_states[layer][0]
        pooled = {"cls": tokens[0], "mean": tokens.mean(0), "max": tokens.amax(0)}[pooling]
        np.testing.assert_allclose(vector, pooled.numpy(), atol=2e-5)


def test_similarity_is_the_cosine_of_two_embeddings(model):
    left, right = model.embed(["the cat sat", "the sky is blue"], pooling="cls")
    expected = torch.cosine_similarity(torch.tensor(left), torch.tensor(right), dim=0)
    assert model.similarity("the cat sat", "the sky is blue", pooling="cls") == pytest.approx(float(expected), abs=1e-6)
    assert model.similarity("the cat sat", "the cat sat") == pytest.approx(1, abs=1e-6)
    assert [each.cut_tokens for each in model.map(Compare(), [("a " * 60, "cat")])] == [62 - POSITIONS]


def test_scores_are_sums_over_each_token_masked_in_turn(model, pretrained):
    reference = transformers.AutoModelForMaskedLM.from_pretrained(pretrained).eval()
    text = "the man went playing to the store"
    ids = transformers.AutoTokenizer.from_pretrained(pretrained)(text)["input_ids"]
    expected = []
    for place in range(1, len(ids) - 1):
        masked = torch.tensor([[*ids[:place], 4, *ids[place + 1 :]]])
        with torch.no_grad():
            expected.append(float(reference(input_ids=masked).logits[0, place].log_softmax(-1)[ids[place]]))
    score = model.score(text)
    np.testing.assert_allclose([token.log_probability for token in score.tokens], expected, atol=1e-5)
    assert score.log_probability == pytest.approx(sum(expected), abs=1e-4)
    assert score.mean_log_probability == pytest.approx(np.mean(expected), abs=1e-5)
    assert [token.token for token in score.tokens][3:5] == ["play", "##ing"]


def test_attention_is_that_of_transformers(model, pretrained):
    reference = transformers.AutoModel.from_pretrained(pretrained, attn_implementation="eager").eval()
    inputs = transformers.AutoTokenizer.from_pretrained(pretrained)("the cat sat", "on the mat", return_tensors="pt")
    with torch.no_grad():
        expected = torch.stack(reference(**inputs, output_attentions=True).attentions)[:, 0]
    ours = model.attention("the cat sat", "on the mat")
    assert ours.tokens == ["[CLS]", "the", "cat", "sat", "[SEP]", "on", "the", "mat", "[SEP]"]
    np.testing.assert_allclose(ours.weights, expected.numpy(), atol=1e-5)


def test_a_word_in_its_contexts_beside_its_static_vector(model, pretrained):
    reference = transformers.AutoModel.from_pretrained(pretrained).eval()
    texts = ["I ate an apple, playing", "apple is playing and the man is playing"]
    found = model.word("playing", texts)
    assert [(word.text, word.text[word.start : word.end]) for word in found] == [
        (texts[0], "playing"),
        (texts[1], "playing"),
        (texts[1], "playing"),
    ]
    ids = model.tokenizer.encode("playing")
    static = reference.embeddings.word_embeddings.weight[ids].mean(0).detach()
    with torch.no_grad():
        inputs = transformers.AutoTokenizer.from_pretrained(pretrained)(texts[0], return_tensors="pt")
        vector = reference(**inputs).last_hidden_state[0, 6:8].mean(0)
    np.testing.assert_allclose(found[0].vector, vector.numpy(), atol=2e-5)
    np.testing.assert_allclose(found[0].static, static.numpy(), atol=1e-6)
    assert found[0].cosine_to_static == pytest.approx(float(torch.cosine_similarity(vector, static, dim=0)), abs=1e-5)
    assert found[0].cosines[0] == pytest.approx(1) and len(found[0].cosines) == 3
    with pytest.raises(UserError, match="found no 'play' in"):
        model.word("play", [texts[0]])  # it is only a part of a word there
    found = model.word("Zürich", ["the q and zurich , zu", "ZÜRICH q"])  # to this tokenizer [UNK], as many others
    assert [word.text[word.start : word.end] for word in found] == ["zurich", "ZÜRICH"]
    with pytest.raises(UserError, match="found no 'qq' in"):
        model.word("qq", ["the q"])


def test_a_byte_level_word_in_its_contexts(tmp_path):
    """At the beginning, behind a space, a bracket and in a pair, but never as a part of another word."""
    text = "apple i ate an apple , pineapple phone"
    folder = save_model(tmp_path, ours=byte_tokenizer([text] * 2))
    model, reference = Predictor.from_folder(folder), transformers.AutoModel.from_pretrained(folder).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["apple phone", "i ate an apple", "(apple), pineapple apples apple.", "an\tapple phone"]
    found = model.word("apple", texts)
    assert [(word.text, word.start) for word in found] == [
        (texts[0], 0),
        (texts[1], 9),
        (texts[2], 1),
        (texts[2], 26),
        (texts[3], 3),
    ]
    table = reference.embeddings.word_embeddings.weight.detach()
    for word in found:
        assert word.text[word.start : word.end] == "apple" and len(word.cosines) == len(found)
        inputs = theirs(word.text, return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0].tolist()
        chosen = [n for n, (low, high) in enumerate(offsets) if low < word.end and high > word.start]
        with torch.no_grad():
            vector = reference(**inputs).last_hidden_state[0, chosen].mean(0)
        static = table[inputs["input_ids"][0, chosen]].mean(0)
        np.testing.assert_allclose(word.vector, vector.numpy(), atol=2e-5)
        expected = float(torch.cosine_similarity(vector, static, dim=0))
        assert word.cosine_to_static == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match="found no 'apple' in"):
        model.word("apple", ["pineapple apples"])


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
        (lambda: model.tag("a"), "found a BertForPreTraining, expected a model with the head for tag; it can fill"),
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
    with pytest.raises(UserError, match="with the head for fill-mask; it can answer, similarity, embed, features"):
        answering.fill_mask("[MASK]")


def said_by(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def test_models_that_python_names(pretrained, monkeypatch):
    for wrong in (None, 3, "", "  "):
        for load in (cloze.load, Predictor.from_folder):
            assert said_by(lambda load=load, wrong=wrong: load(wrong)).startswith(
                f"model: found {wrong!r}, expected the folder of a Cloze run"
            )
    monkeypatch.setenv("HOME", str(pretrained.parent))
    assert cloze.load(f"~/{pretrained.name}").loaded.source == str(pretrained)


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


def test_no_text_has_no_vector(model):
    found = model.embed([])
    assert found.dtype == np.float32 == model.embed(["a"]).dtype
    assert found.shape == (0, model.config.hidden_size) and model.embed([], dimensions=4).shape == (0, 4)
