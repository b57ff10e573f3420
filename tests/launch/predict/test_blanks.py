"""Words for blanks, against transformers."""

import re

import numpy as np
import pytest
import torch
import transformers

from cloze.launch.predict.predictor import Predictor
from tests.byte_level import byte_tokenizer
from tests.launch.predict.test_predictor import pipe
from tests.launch.tiny_models import save_model


def test_a_byte_level_blank_stands_for_a_word_with_its_space(tmp_path):
    """As transformers encodes it, where the mask takes the space as that of RoBERTa does, and as pretraining masks."""
    folder = save_model(tmp_path, ours=byte_tokenizer(["the man went to york . the sky is blue"] * 2))
    theirs = pipe("fill-mask", folder, top_k=5)
    ours = Predictor.from_folder(folder)
    for text in ("the man [MASK] to york", "the man[MASK]to york", "[MASK] man went to [MASK] [MASK]."):
        encoding = ours.loaded.encoder.encode(text, blanks=True)
        assert encoding.ids == theirs.tokenizer(text)["input_ids"]
        assert [text[slice(*encoding.offsets[place])] for place in encoding.blanks] == ["[MASK]"] * len(encoding.blanks)
        assert [text[low:high] for low, high in encoding.offsets[1:-1]] == re.findall(r"\[MASK\]|\w+|\.", text)
        expected = theirs(text)
        expected = [expected] if isinstance(expected[0], dict) else expected
        for guesses, blank in zip(ours.fill_mask(text), expected, strict=True):
            assert [guess.token for guess in guesses] == [each["token_str"] for each in blank]
            np.testing.assert_allclose([g.probability for g in guesses], [e["score"] for e in blank], atol=2e-6)
    words = ours.tokenizer.encode("the man went to york")
    masked = ours.loaded.encoder.encode("the man [MASK] to york", blanks=True).ids[1:-1]
    assert masked == [*words[:2], ours.tokenizer.special_tokens.mask, *words[3:]]


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
