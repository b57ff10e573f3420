"""What overlapping windows say together: where each token counts, which spans are likeliest."""

import numpy as np
import pytest

from cloze.launch.texts.encoding import windows as windows_of
from cloze.launch.texts.windows import answer_spans, counts_once, is_unanswered
from tests.references import best_window


def test_a_token_of_several_windows_counts_in_the_one_where_most_stands_around_it():
    for total in range(1, 30):
        windows = list(windows_of(total, 7, 3))
        expected = [
            best_window(windows, token) == number
            for number, (first, end) in enumerate(windows)
            for token in range(first, end)
        ]
        chosen = counts_once(windows)
        assert chosen.tolist() == expected and chosen.sum() == total


def test_the_best_spans_of_several_windows():
    """Against a search over all pairs: in several windows the best score counts, no span is too long or reversed."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        windows, scores = [], {}
        for first in (0, 3, 6):
            starts, ends = rng.normal(size=(2, 8)).astype(np.float32)
            allowed = np.arange(8) >= 2
            offsets = [(0, 0)] * 2 + [(2 * (first + n), 2 * (first + n) + 1) for n in range(6)]
            windows.append((starts, ends, allowed, offsets))
            for a in range(2, 8):
                for b in range(a, min(8, a + 3)):
                    span = offsets[a][0], offsets[b][1]
                    scores[span] = max(scores.get(span, -np.inf), float(starts[a] + ends[b]))
        best = sorted(scores.items(), key=lambda item: -item[1])[:5]
        found = answer_spans(" " * 30, windows, 1000, 3)
        assert len(found) == len(scores) and [span for span, _ in found[:5]] == [span for span, _ in best]
        assert [score for _, score in found[:5]] == pytest.approx([score for _, score in best])


@pytest.mark.parametrize(
    "text,tokens,whole",
    [
        ("In Londonderry, 1990", ["In", "London", "derry", ",", "19", "90"], {"In", "Londonderry", ",", "1990"}),
        ("Cafe\u0301s", ["Cafe", "\u0301s"], {"Cafe\u0301s"}),
        # Of a tokenizer that strips accents the marks are of no token: decomposed letters, vowel signs.
        ("Cafe\u0301 ole\u0301", ["Cafe", "ole"], {"Cafe\u0301", "ole\u0301"}),
        (
            "a \u0928\u092e\u0938\u094d\u0924\u0947",
            ["a", "\u0928\u092e\u0938\u094d\u0924"],
            {"a", "\u0928\u092e\u0938\u094d\u0924\u0947"},
        ),
        ("\u6771\u4eac\u90fd", ["\u6771", "\u4eac", "\u90fd"], {"\u6771", "\u4eac", "\u90fd"}),  # no spaces to go by
    ],
)
def test_an_answer_neither_begins_nor_ends_inside_a_word(text, tokens, whole):
    offsets, after = [], 0
    for token in tokens:
        low = text.index(token, after)
        after = low + len(token)
        offsets.append((low, after))
    falling = np.linspace(1, 0, len(tokens))
    found = answer_spans(text, [(falling, falling, np.ones(len(tokens), bool), offsets)], 20, len(tokens))
    spans = {text[low:high] for (low, high), _ in found}
    assert whole <= spans and not (set(tokens) - whole) & spans, spans
    # Of a word of which a window has a part only, the part is better than nothing.
    part = np.ones(1), np.ones(1), np.ones(1, bool), [(3, 5)]
    assert answer_spans("Londonderry", [part], 20, 5) == [((3, 5), 2.0)]


def test_tokens_of_a_question_that_is_longer_than_its_context_are_no_places_in_it():
    question = np.array([9.0, 1.0]), np.array([9.0, 1.0]), np.array([False, True]), [(40, 45), (0, 3)]
    assert answer_spans("sky", [question], 20, 5) == [((0, 3), 2.0)]


@pytest.mark.parametrize(("odds", "unanswered"), [(-1.0, False), (0.0, False), (1e-6, True), (np.inf, True)])
def test_no_answer_must_be_likelier_than_the_best_span(odds, unanswered):
    assert is_unanswered(odds) == unanswered
