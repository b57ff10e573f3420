"""Losses of fine-tuning: of classes, and of one softmax over all windows of a text, against plain loops."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from cloze.launch.commands import parse
from cloze.launch.finetune.job import read_examples
from cloze.launch.finetune.models import start_model
from cloze.launch.finetune.objective import FinetuningObjective
from cloze.launch.finetune.squad import read_squad
from cloze.launch.finetune.tasks import find_task
from cloze.launch.pretrained.source import find_source
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.texts.encoding import windows as windows_of
from cloze.launch.training.schedules import multiplier
from cloze.model.tasks import BertForQuestionAnswering
from tests.launch.finetune.examples.test_answering import answer_examples
from tests.launch.finetune.running import arguments, finetune
from tests.launch.finetune.small import make_model, squad
from tests.launching import weights
from tests.references import best_window


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


def test_losses_are_those_of_a_plain_loop_over_transformers_own_class(files, tmp_path):
    """The same start, order and numbers, without dropout: each step's loss and the last weights."""
    model = make_model(tmp_path / "model", dropout=0.0)
    steps = 12
    overrides = ("--epochs", "null", "--train.max_steps", steps, "--schedule.warmup_steps", 3, "--seed", 5)
    finetune("sst2", model, *files, tmp_path / "run", *overrides)
    ours = [line["train/loss"] for line in read_metrics(tmp_path / "run") if "train/loss" in line]

    words = arguments("sst2", model, *files, tmp_path / "run", *overrides)[1:]
    config = parse("finetune", words).for_task(find_task("sst2"), 64)
    source = find_source(config)
    architecture, head, train, *_ = read_examples(config, find_task("sst2"), source.tokenizer)
    start_model(architecture, source, head, config)[0].save(tmp_path / "start", model)
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start").train()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    rows = [line.split("\t") for line in files[0].read_text().splitlines()[1:]]
    matrices = [p for p in reference.parameters() if p.dim() > 1]
    others = [p for p in reference.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=1.0, eps=1e-6
    )
    order = np.concatenate([_order(len(rows), 5, epoch) for epoch in range(3)])
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * multiplier(config.schedule, step, steps)
        chosen = [rows[number] for number in order[step * 8 : step * 8 + 8]]
        batch = tokenizer([text for text, _ in chosen], padding=True, return_tensors="pt")
        loss = reference(**batch, labels=torch.tensor([int(label) for _, label in chosen])).loss
        assert ours[step] == pytest.approx(loss.item(), abs=2e-5), step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    made = weights(tmp_path / "run", steps)
    assert (made["classifier.weight"] - reference.classifier.weight).abs().max() < 2e-5


def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    """An epoch's order as docs/finetune.md states it: a permutation by PCG64 seeded with (seed, 2, epoch, 0)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 2, epoch, 0)))).permutation(count)
