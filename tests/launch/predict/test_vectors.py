"""Vectors of texts, tokens and words against transformers, and attention."""

import numpy as np
import pytest
import torch
import transformers

from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.vectors import Compare, Features, cosine
from cloze.pipeline.errors import UserError
from tests.byte_level import byte_tokenizer
from tests.launch.predict.asking import TEXTS, pipe
from tests.launch.tiny_models import POSITIONS, save_model


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


def test_a_cosine_is_at_most_one_whatever_the_rounding():
    vectors = np.random.default_rng(0).normal(size=(300, 48)).astype(np.float32)
    assert all(-1 <= cosine(sign * each, each) <= 1 for each in vectors for sign in (1, -1))


def test_similarity_is_the_cosine_of_two_embeddings(model):
    left, right = model.embed(["the cat sat", "the sky is blue"], pooling="cls")
    expected = torch.cosine_similarity(torch.tensor(left), torch.tensor(right), dim=0)
    assert model.similarity("the cat sat", "the sky is blue", pooling="cls") == pytest.approx(float(expected), abs=1e-6)
    assert model.similarity("the cat sat", "the cat sat") == pytest.approx(1, abs=1e-6)
    assert [each.cut_tokens for each in model.map(Compare(), [("a " * 60, "cat")])] == [62 - POSITIONS]


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


def test_no_text_has_no_vector(model):
    found = model.embed([])
    assert found.dtype == np.float32 == model.embed(["a"]).dtype
    assert found.shape == (0, model.config.hidden_size) and model.embed([], dimensions=4).shape == (0, 4)
