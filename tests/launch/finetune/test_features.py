"""Less than all weights learn: a frozen encoder that runs once, features of several layers, gradual unfreezing."""

import json
import random
import re
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.finetune.features import encode_once
from cloze.launch.finetune.job import read_examples
from cloze.launch.finetune.models import start_model, unfreezing
from cloze.launch.finetune.tasks import find_task
from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.source import find_source
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launch.finetune.examples.test_tagging import conll
from tests.launch.finetune.running import arguments, finetune, lines
from tests.launch.finetune.small import make_model, squad
from tests.launch.finetune.test_objective import _order
from tests.launching import (
    assert_killed_equals_whole,
    assert_same_run,
    assert_same_weights,
    finish,
    kill_at,
    resume,
    weights,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four layers, so that there is a concatenation of the last four; dropout, which features must not have."""
    return make_model(tmp_path_factory.mktemp("model"), layers=4)


def prepared(task, model, train, *overrides):
    """The model that a command would start with, in evaluation mode, and its training examples."""
    config = parse(
        "finetune",
        [task, "--model", str(model), "--train", str(train), "--validation", str(train), "--output", "o", *overrides],
    ).for_task(find_task(task), 64)
    source = find_source(config)
    architecture, head, examples, *_ = read_examples(config, find_task(task), source.tokenizer)
    return start_model(architecture, source, head, config)[0].eval(), examples


@pytest.mark.parametrize("layers", ["last", "last_four", "weighted"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_what_a_head_reads_is_what_transformers_layers_say(model, files, layers, pooling):
    ours, examples = prepared("sst2", model, files[0], "--read_layers", layers, "--pooling", pooling)
    if layers == "weighted":
        torch.nn.init.normal_(ours.mix.weights)
        torch.nn.init.constant_(ours.mix.scale, 1.7)
    reference, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    pools = {
        "cls": lambda states: states[0],
        "mean": lambda states: states.mean(0),
        "max": lambda states: states.amax(0),
    }
    texts = [line.split("\t")[0] for line in files[0].read_text().splitlines()[1:7]]
    with torch.no_grad():
        scores = ours(**examples.batch(np.arange(6))).logits
        for text, score in zip(texts, scores, strict=True):
            states = [
                pools[pooling](state[0])
                for state in reference(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[
                    1:
                ]
            ]
            if layers == "weighted":
                vector = 1.7 * sum(w * state for w, state in zip(ours.mix.weights.softmax(0), states, strict=True))
            else:
                vector = states[-1] if layers == "last" else torch.cat(states[-4:])
            assert torch.allclose(score, ours.classifier(vector), atol=1e-5)


@pytest.mark.parametrize(
    "task, overrides",
    [
        ("sst2", ()),
        ("sst2", ("--read_layers", "weighted", "--pooling", "max")),
        ("ner", ("--read_layers", "last_four")),
        ("squad", ("--max_length", "24", "--window_step", "8")),
        ("squad", ("--max_length", "24", "--window_step", "8", "--answer_softmax", "document")),
        ("multiple-choice", ()),
    ],
)
def test_losses_from_kept_features_are_those_of_the_whole_model_and_no_encoder_runs(
    model, files, tmp_path, monkeypatch, task, overrides
):
    monkeypatch.setattr("cloze.launch.system.distributed.reduce_sum", lambda tensor: tensor)  # of one process
    rng, train = random.Random(0), files[0]
    if task == "ner":
        train = conll(tmp_path / "train.conll", rng, 9)
    elif task == "squad":
        train = squad(tmp_path / "train.json", rng, 9)
    elif task == "multiple-choice":
        train = tmp_path / "choices.jsonl"
        train.write_text(
            "".join(
                json.dumps({"text": "w1 w2", "label": n % 4} | {f"choice{c}": f"w{c + n}" for c in range(4)}) + "\n"
                for n in range(9)
            )
        )
    ours, examples = prepared(task, model, train, *overrides)
    cached = encode_once(ours.features, examples, 4, Environment(), torch.device("cpu"), lambda: None)
    chosen = np.random.default_rng(0).permutation(len(examples))[:7]
    whole = ours(**examples.batch(chosen), **examples.targets(chosen))
    batch = cached.inputs(chosen) | cached.targets(chosen)
    assert "input_ids" not in batch

    def never(*arguments, **inputs):
        raise AssertionError("the encoder ran")

    ours.bert.forward = never
    kept = ours(**batch)
    for name in ("losses", "logits", "start_losses", "end_losses", "end_logits"):
        if hasattr(whole, name):
            assert torch.allclose(getattr(kept, name), getattr(whole, name), atol=1e-5)


def test_features_that_do_not_fit_into_memory_are_refused(model, files, monkeypatch):
    monkeypatch.setattr("cloze.launch.system.distributed.reduce_sum", lambda tensor: tensor)
    ours, examples = prepared("sst2", model, files[0])
    for free, fits in ((len(examples) * 32 * 4 - 1, False), (len(examples) * 32 * 4, True), (None, True)):
        monkeypatch.setattr("cloze.launch.finetune.features.available_bytes", lambda free=free: free)
        with nullcontext() if fits else pytest.raises(UserError, match="vectors of the encoder to keep, 0.0 GB"):
            encode_once(ours.features, examples, 4, Environment(), torch.device("cpu"), lambda: None)


def test_a_frozen_encoder_learns_as_in_a_plain_loop_over_transformers(model, files, tmp_path):
    """The encoder in evaluation mode, pooler and classifier learn: every step's loss, the last weights."""
    steps = 10
    overrides = (
        "--epochs",
        "null",
        "--train.max_steps",
        steps,
        "--schedule.warmup_steps",
        0,
        "--seed",
        5,
        "--freeze",
        "encoder",
        "--schedule.name",
        "constant",
        "--dropout",
        0,
    )
    _, said = finetune("sst2", model, *files, tmp_path / "run", *overrides)
    assert re.search(r"the encoder has run over 141 examples once, in [\d.]+ s", said)
    ours = [line["train/loss"] for line in read_metrics(tmp_path / "run") if "train/loss" in line]
    started, _ = prepared("sst2", model, files[0], "--seed", "5", "--dropout", "0")
    started.save(tmp_path / "start", model)
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    rows = [line.split("\t") for line in files[0].read_text().splitlines()[1:]]
    learning = [p for name, p in reference.named_parameters() if name.startswith(("bert.pooler", "classifier"))]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in learning if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in learning if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=3e-3,
        eps=1e-6,
    )
    order = np.concatenate([_order(len(rows), 5, epoch) for epoch in range(3)])
    for step in range(steps):
        chosen = [rows[number] for number in order[step * 8 : step * 8 + 8]]
        batch = tokenizer([text for text, _ in chosen], padding=True, return_tensors="pt")
        loss = reference(**batch, labels=torch.tensor([int(label) for _, label in chosen])).loss
        assert ours[step] == pytest.approx(loss.item(), abs=2e-5), step
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
    made = weights(tmp_path / "run", steps)
    assert (made["classifier.weight"] - reference.classifier.weight).abs().max() < 2e-5
    assert (made["bert.pooler.dense.weight"] - reference.bert.pooler.dense.weight).abs().max() < 2e-5


def test_features_of_several_layers_over_processes_and_kills(model, files, tmp_path):
    """Weighted layers, with dropout: killed and started again, the same bits; then predicted from the folder.

    The model that it began with has changed meanwhile, which is accepted: what counts is the checkpoint's.
    """
    model = shutil.copytree(model, tmp_path / "model")
    options = (
        "--freeze",
        "encoder",
        "--read_layers",
        "weighted",
        "--pooling",
        "mean",
        "--epochs",
        6,
        "--checkpoint.every_steps",
        7,
    )
    results, _ = finetune("sst2", model, *files, tmp_path / "one", *options)
    assert results["validation"]["accuracy"] > 0.5
    again = arguments("sst2", model, *files, tmp_path / "killed", *options)
    kill_at(30, again)
    changed = {name: 1.5 * tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    assert "with another run, whose model_hash is" in finish(ForkedRun(again), 2)
    resume([*again, "--checkpoint.accept_changes", "true"])
    assert_same_run(tmp_path / "killed", tmp_path / "one")
    assert (weights(tmp_path / "one")["mix.weights"] != 0).all()
    predictor = Predictor.from_folder(tmp_path / "one")
    texts = [line.split("\t")[0] for line in files[1].read_text().splitlines()[1:]]
    for ours, text in zip(lines(tmp_path / "one" / "predictions" / "validation.jsonl"), texts, strict=True):
        best = predictor.classify(text)[0]
        assert best.label == ours["prediction"]
        assert best.score == pytest.approx(ours["probabilities"][best.label], abs=1e-5)


def test_two_processes_share_the_encoding(model, files, tmp_path):
    options = ("--freeze", "encoder", "--dropout", 0, "--epochs", 1)
    finetune("sst2", model, *files, tmp_path / "one", *options)
    finetune("sst2", model, *files, tmp_path / "two", *options, processes=2)
    assert_same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"), 1e-5)


def test_layers_begin_to_learn_one_by_one_from_the_top(model, files, tmp_path):
    ours, _ = prepared("sst2", model, files[0])
    stream = unfreezing(iter(range(12)), ours, 0, 2)
    learning = []
    for _ in stream:
        parts = [ours.bert.embeddings, *ours.bert.encoder.layers]
        learning.append([all(p.requires_grad for p in part.parameters()) for part in parts])
        assert all(p.requires_grad for p in (*ours.classifier.parameters(), *ours.bert.pooler.parameters()))
    assert learning == [[n < step // 2 for n in (4, 3, 2, 1, 0)] for step in range(12)]
    next(unfreezing(iter([0]), ours, 7, 2))
    assert [
        p.requires_grad
        for p in (
            ours.bert.encoder.layers[0].feed_forward.up.weight,
            ours.bert.encoder.layers[1].feed_forward.up.weight,
        )
    ] == [False, True]


def test_a_run_unfreezes_and_goes_on_so_after_a_kill(model, files, tmp_path):
    options = (
        "--unfreeze_every_epochs",
        1,
        "--epochs",
        3,
        "--checkpoint.every_steps",
        10,
        "--evaluate_every_epochs",
        5,
    )
    finetune("sst2", model, *files, tmp_path / "one", *options)
    after, before = weights(tmp_path / "one"), AutoModel.from_pretrained(model).state_dict()
    moved = [
        not torch.equal(
            after[f"bert.encoder.layers.{n}.attention.output.weight"],
            before[f"encoder.layer.{n}.attention.output.dense.weight"],
        )
        for n in range(4)
    ]
    assert moved == [False, False, True, True]
    again = arguments("sst2", model, *files, tmp_path / "killed", *options)
    assert_killed_equals_whole(tmp_path / "one", 25, again)


@pytest.mark.parametrize(
    "task, options, said",
    [
        ("sst2", ("--read_layers", "weighted"), "pooling: found pooler with read_layers weighted"),
        ("squad", ("--read_layers", "last_four"), "read_layers: found last_four with the task squad"),
        ("swag", ("--pooling", "mean"), "pooling: found mean with the task swag"),
        (
            "sst2",
            ("--unfreeze_every_epochs", "1", "--freeze", "encoder"),
            "unfreeze_every_epochs: found freeze encoder",
        ),
        (
            "sst2",
            ("--unfreeze_every_epochs", "1", "--optimizer.name", "stable_adamw"),
            "unfreeze_every_epochs: found optimizer.name stable_adamw",
        ),
        (
            "sst2",
            ("--unfreeze_every_epochs", "1", "--optimizer.implementation", "deepspeed"),
            "unfreeze_every_epochs: found optimizer.implementation deepspeed, expected torch",
        ),
        ("sst2", ("--unfreeze_every_epochs", "1", "--zero.stage", "1"), "unfreeze_every_epochs: found zero.stage 1"),
        ("sst2", ("--freeze", "encoder", "--zero.stage", "3"), "freeze: found encoder at zero.stage 3"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(model, files, tmp_path, capsys, task, options, said):
    assert (
        main(
            [
                "finetune",
                task,
                "--model",
                str(model),
                "--train",
                str(files[0]),
                "--validation",
                str(files[1]),
                "--output",
                str(tmp_path / "run"),
                "--max_length",
                "32",
                *options,
            ]
        )
        == 2
    )
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1
