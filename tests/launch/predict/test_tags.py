"""Tags of words, against transformers."""

import numpy as np
import pytest
import torch
import transformers

from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.tags import TagWords
from cloze.launch.texts.encoding import TextEncoder, windows
from tests.launch.predict.asking import TEXTS, pipe
from tests.launch.tiny_models import POSITIONS, TAGS, labels, save_model


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize(
    "names, least", [(TAGS, 20), (("O", "E-PER", "S-PER", "B-LOC", "NOUN-proper"), 5)], ids=["IOB2", "other dashes"]
)
def test_tags_with_their_characters(tmp_path, aggregation, names, least):
    save_model(tmp_path, "BertForTokenClassification", seed=3, **labels(*names))
    theirs = pipe("token-classification", tmp_path, aggregation_strategy=aggregation)
    ours, texts, found = Predictor.from_folder(tmp_path), TEXTS, 0
    for text, tags in zip(texts, ours.map(TagWords(aggregation=aggregation), texts), strict=True):
        expected = theirs(text)
        name = "entity" if aggregation == "none" else "entity_group"
        assert [(tag.label, tag.start, tag.end) for tag in tags] == [(e[name], e["start"], e["end"]) for e in expected]
        np.testing.assert_allclose([tag.score for tag in tags], [e["score"] for e in expected], atol=2e-6)
        assert all(tag.text == text[tag.start : tag.end] for tag in tags)
        found += len(tags)
    assert found > least


def test_a_long_text_is_tagged_to_its_end_and_its_edges_do_not_show(tmp_path):
    """Windows overlap by half: a token's tag is the one it gets in the window that shows most around it."""
    save_model(tmp_path, "BertForTokenClassification", seed=3, **labels(*TAGS))
    ours = Predictor.from_folder(tmp_path)
    words = ("the man went to newyork and bought playing milk ," * 12).split()
    text = "  ".join(words)
    (tags,) = ours.map(TagWords("none", ignored_label=""), [text])
    judged = {(tag.start, tag.end): tag for tag in tags}
    encoding = TextEncoder(ours.tokenizer, 1 << 30).encode(text)
    assert list(judged) == encoding.offsets[1:-1], "every token once, in order, to the end"
    reference = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    inner = encoding.ids[1:-1]
    size, best = POSITIONS - 2, {}
    for start, end in windows(len(inner), size, POSITIONS // 2):
        with torch.no_grad():
            ids = torch.tensor([[2, *inner[start:end], 3]])
            shares = reference(input_ids=ids).logits[0].softmax(-1)
        for place in range(1, end - start + 1):
            context = min(place, end - start + 1 - place)
            if context > best.get(start + place, (0,))[0]:
                best[start + place] = context, shares[place]
    for token, (_, shares) in best.items():
        tag = judged[encoding.offsets[token]]
        assert tag.label == TAGS[shares.argmax()] and tag.score == pytest.approx(float(shares.max()), abs=2e-6)
