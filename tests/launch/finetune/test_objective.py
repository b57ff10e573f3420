"""One softmax over all windows of a text, against a plain loop."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from cloze.launch.commands import parse
from cloze.launch.finetune.models import start_model
from cloze.launch.finetune.objective import FinetuningObjective
from cloze.launch.finetune.squad import read_squad
from cloze.launch.pretrained.source import find_source
from cloze.launch.texts.encoding import windows as windows_of
from cloze.model.tasks import BertForQuestionAnswering
from tests.launch.finetune.examples.test_answering import answer_examples
from tests.launch.finetune.small import make_model, squad


def best_window(windows: list[tuple[int, int]], token: int) -> int:
    """Where a token counts: with most context on its poorer side; in the first of equal ones."""
    scores = [min(token - first, end - 1 - token) if first <= token < end else -1 for first, end in windows]
    return scores.index(max(scores))


@pytest.mark.parametrize("task", ["squad", "squad2"])
def test_one_softmax_over_all_windows_of_a_text(tmp_path, task):
    """Against scores by transformers, window by window, put together token by token; and its gradient."""
    model = make_model(tmp_path / "model", dropout=0.0)
    path = squad(tmp_path / "train.json", random.Random(4), 12, task == "squad2")
    examples = answer_examples(model, path, task, "--answer_softmax", "document")
    assert len(examples) == 12 < len(examples._windows)
    config = parse("finetune", [task, "--model", str(model), "--train", "t", "--validation", "v", "--output", "o"])
    reader = start_model(BertForQuestionAnswering, find_source(config), None, config)[0].eval()
    reader.save(tmp_path / "saved", model)
    reference = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "saved").eval()
    everything = np.arange(len(examples))
    micro = examples.batch(everything) | examples.targets(everything)
    objective = FinetuningObjective(examples)
    loss, _ = objective(reader(**micro), micro, torch.tensor(objective.counts([micro]), dtype=torch.float64))
    loss.backward()

    expected = []
    contexts, questions, _ = read_squad(path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for question in questions:
        encoded = tokenizer(contexts[question.context], add_special_tokens=False, return_offsets_mapping=True)
        asked = tokenizer(question.text, add_special_tokens=False)["input_ids"]
        windows = list(windows_of(len(encoded["input_ids"]), 24 - 3 - len(asked), 8))
        scores = []
        for first, end in windows:
            ids = [2, *asked, 3, *encoded["input_ids"][first:end], 3]
            segments = [0] * (len(asked) + 2) + [1] * (end - first + 1)
            output = reference(torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
            scores.append(torch.stack([output.start_logits[0], output.end_logits[0]]))
        where = [best_window(windows, token) for token in range(len(encoded["input_ids"]))]
        tokens = [scores[window][:, token - windows[window][0] + len(asked) + 2] for token, window in enumerate(where)]
        starts = [[low for low, _ in encoded["offset_mapping"]].index(start) for _, start in question.answers]
        nothing = [part[:, 0] for part in scores] if task == "squad2" else []
        chances = torch.stack(tokens + nothing).softmax(0)
        # The answer is one token, its own start and end.
        right = chances[starts[0]] if starts else chances[len(tokens) :].sum(0)
        expected.append(-right.log().mean())
    total = torch.stack(expected).mean()
    total.backward()
    assert loss.item() == pytest.approx(total.item(), abs=1e-5)
    assert (reader.span.weight.grad - reference.qa_outputs.weight.grad).abs().max() < 1e-5
    ours = reader.bert.embeddings.word.weight.grad[:74] - reference.bert.embeddings.word_embeddings.weight.grad
    assert ours.abs().max() < 1e-5
    outputs = torch.stack(
        [reader(**examples.batch(everything)).start_logits, reader(**examples.batch(everything)).end_logits], -1
    )
    assert examples.metrics(outputs.detach().numpy())["loss"] == pytest.approx(total.item(), abs=1e-5)
    empty = examples.metrics(np.full((examples.num_places, 2), -3e4, np.float32))["loss"]
    assert np.isfinite(empty)
