"""Arrays of many rows and single texts get the same ids."""

import numpy as np
import pytest

from cloze.launch.texts.encoding import TextEncoder
from cloze.launch.texts.sequences import build_sequences
from cloze.launch.texts.settings import Truncation
from tests.launch.finetune.small import WORDS, make_tokenizer


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("keep", ["head", "tail", "head_tail"])
def test_arrays_and_single_texts_get_the_same_ids(pairs, keep):
    """Of all lengths around the limit, cut or not."""
    tokenizer = make_tokenizer()
    generator = np.random.default_rng(0)
    texts = [[" ".join(generator.choice(WORDS, count)) for count in generator.integers(1, 24, 60)] for _ in range(2)]
    truncation = Truncation(16, keep, head_tokens=5)
    second = texts[1] if pairs else None
    sequences, cut = build_sequences(tokenizer, texts[0], second, truncation)
    encoder = TextEncoder(tokenizer, 16, truncation=truncation)
    single = [encoder.encode(text, second and second[number], cut=True) for number, text in enumerate(texts[0])]
    assert sequences.input_ids.tolist() == [token for each in single for token in each.ids]
    assert sequences.lengths.tolist() == [len(each) for each in single]
    assert sequences.segment_b_start.tolist() == [each.segment_b_start for each in single]
    assert cut.tokens == sum(each.cut_tokens for each in single) > 0
