"""Losses of each kind of task."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cloze.launch.commands import parse
from cloze.launch.finetune.models import start_model
from cloze.launch.finetune.reading import read_examples
from cloze.launch.finetune.tasks import find_task
from cloze.launch.pretrained.source import find_source
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.training.schedules import multiplier
from tests.launch.finetune.running import arguments, finetune
from tests.launch.finetune.small import make_model
from tests.launching import weights


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
