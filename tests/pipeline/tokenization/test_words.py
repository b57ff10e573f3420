"""Words and how often they occur."""

from collections import Counter

import pytest
import tokenizers
from tokenizers import models

from cloze.pipeline.config import VocabularyConfig
from cloze.pipeline.jobs.vocabulary import _count_chunk, _set_rules
from cloze.pipeline.tokenization.words import WordSplitter, word_of


@pytest.mark.parametrize("model", ["wordpiece", "bytes"])
def test_noise_is_not_counted_and_normalised_words_are(model):
    """Without white space a corpus is words of KBs, all different; accents that go may still leave a word."""
    backend, counts = tokenizers.Tokenizer(models.WordLevel({})), Counter()
    _set_rules(backend, VocabularyConfig(model=model))
    noise = [(letter * 10_000).encode() for letter in "abcdé"]
    _count_chunk([*noise, "é".encode() * 600, b"kalo-kalo"], WordSplitter(backend), counts)
    expected = ["-", "kalo", "é" * 600] if model == "wordpiece" else ["-", "kalo"]
    assert sorted(word_of(key) for key in counts) == expected
