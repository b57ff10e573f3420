"""Answers in contexts, against transformers."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors

from cloze.launch.predict.predictor import Predictor
from cloze.launch.texts.windows import best_spans
from tests.byte_level import byte_tokenizer
from tests.launch.tiny_models import save_model, tokenizer

CONTEXT = "The man went  to the store, and bought a gallon of milk. The cat sat on the mat; the sky is blue! " * 2


def spans_of(reference, question: str, context: str, size: int, step: int, longest: int) -> dict:
    """All spans of all windows by a plain loop over the model of transformers: characters -> sum of logits."""
    ours = tokenizer()
    asked = ours.backend.encode(question, add_special_tokens=False)
    text = ours.backend.encode(context, add_special_tokens=False)
    room, found, nulls = size - len(asked.ids) - 3, {}, []
    start = 0
    while True:
        part = text.ids[start : start + room]
        ids = [2, *asked.ids, 3, *part, 3]
        segments = [0] * (len(asked.ids) + 2) + [1] * (len(part) + 1)
        with torch.no_grad():
            output = reference(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
        begins, ends = output.start_logits[0], output.end_logits[0]
        nulls.append(float(begins[0] + ends[0]))
        shift = len(asked.ids) + 2
        for i in range(len(part)):
            for j in range(i, min(len(part), i + longest)):
                place = text.offsets[start + i][0], text.offsets[start + j][1]
                found[place] = max(found.get(place, -1e9), float(begins[shift + i] + ends[shift + j]))
        if start + room >= len(text.ids):
            return found | {None: min(nulls)}
        start += step


def cuts_a_word(text: str, span: tuple[int, int]) -> bool:
    return any(0 < place < len(text) and text[place - 1].isalnum() and text[place].isalnum() for place in span)


def test_answers_over_all_windows_in_the_characters_of_the_text(tmp_path):
    save_model(tmp_path, "BertForQuestionAnswering", seed=5)
    ours = Predictor.from_folder(tmp_path)
    reference = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    for question in ("who bought milk", "where is the cat sitting"):
        for size, step, longest in ((40, 8, 5), (24, 100, 30)):
            room = size - 3 - len(tokenizer().encode(question))  # a longer step would leave gaps
            expected = spans_of(reference, question, CONTEXT, size, min(step, room), longest)
            null = expected.pop(None)
            # Every start and end is a candidate, so that the best of all spans is what a plain search finds.
            answers = ours.answer(
                question,
                CONTEXT,
                top_k=6,
                max_length=size,
                window_step=step,
                max_answer_tokens=longest,
                candidates=1000,
            )
            expected = {span: score for span, score in expected.items() if not cuts_a_word(CONTEXT, span)}
            best = sorted(expected.items(), key=lambda item: -item[1])[:6]
            for answer, (_, score) in zip(answers, best, strict=True):
                assert answer.score == pytest.approx(score, abs=2e-5)
                assert answer.text == CONTEXT[answer.start : answer.end]
                assert expected[answer.start, answer.end] == pytest.approx(score, abs=2e-5)
            assert (answers[0].start, answers[0].end) == best[0][0]
            with_null = ours.answer(
                question,
                CONTEXT,
                top_k=1000,
                max_length=size,
                window_step=step,
                max_answer_tokens=longest,
                candidates=1000,
                allow_no_answer=True,
            )
            (none,) = [answer for answer in with_null if not answer.text]
            assert none.score == pytest.approx(null, abs=2e-5)
            assert sum(answer.probability for answer in with_null) == pytest.approx(1, abs=1e-6)


def test_a_question_may_be_longer_than_its_context(tmp_path):
    save_model(tmp_path, "BertForQuestionAnswering", seed=5)
    (answer,) = Predictor.from_folder(tmp_path).answer("where is the cat sitting on the mat now", "the cat", top_k=1)
    assert answer.text in ("the", "cat", "the cat")


def test_a_span_as_likely_as_no_answer_is_the_answer(tmp_path):
    """As in fine-tuning: all scores of this model are equal."""
    save_model(tmp_path, "BertForQuestionAnswering", seed=5)
    predictor = Predictor.from_folder(tmp_path)
    torch.nn.init.zeros_(predictor.loaded.model.span.weight)
    answers = predictor.answer("who", CONTEXT, top_k=1000, candidates=1000, allow_no_answer=True)
    assert len({answer.score for answer in answers}) == 1
    assert answers[0].text and not answers[-1].text


def test_byte_level_answers_in_the_characters_of_the_text(tmp_path):
    """Against a plain loop over the offsets that the library's own post-processor trims."""
    save_model(tmp_path, "BertForQuestionAnswering", seed=5, ours=byte_tokenizer([CONTEXT.replace("  ", " ")]))
    ours = Predictor.from_folder(tmp_path)
    reference = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs._tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    context = "The man bought a gallon  of milk."
    asked, text = theirs("who")["input_ids"], theirs(context, return_offsets_mapping=True)
    ids = [2, *asked, 3, *text["input_ids"], 3]
    segments = [0] * (len(asked) + 2) + [1] * (len(ids) - len(asked) - 2)
    with torch.no_grad():
        output = reference(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
    begins, ends = output.start_logits[0][len(asked) + 2 :], output.end_logits[0][len(asked) + 2 :]
    expected = {}
    for i, (start, start_end) in enumerate(text["offset_mapping"]):
        for j, (end_start, end) in enumerate(text["offset_mapping"][i:], i):
            if start < start_end and end_start < end and not cuts_a_word(context, (start, end)):
                expected[start, end] = float(begins[i] + ends[j])
    answers = ours.answer("who", context, top_k=1000, candidates=1000)
    assert all(answer.text == context[answer.start : answer.end] == answer.text.strip() for answer in answers)
    assert {(answer.start, answer.end) for answer in answers} == expected.keys() and "of milk" in {
        answer.text for answer in answers
    }
    for answer in answers:
        assert answer.score == pytest.approx(expected[answer.start, answer.end], abs=2e-5)


def test_spans_never_end_before_they_begin():
    """The best start is behind the best end: with one candidate each, the best of all spans in order is taken."""
    starts, ends = np.array([0.0, 1, 0, 9]), np.array([0.0, 8, 0, 0.5])
    allowed = np.array([False, True, True, True])
    assert best_spans(starts, ends, allowed, allowed, 1, 5) == [((3, 3), 9.5)]
    assert ((1, 2), 1.0) in best_spans(starts, ends, allowed, allowed, 3, 2)
    assert all(last - first < 2 for (first, last), _ in best_spans(starts, ends, allowed, allowed, 3, 2))
