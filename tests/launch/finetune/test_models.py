"""From another task's model, with its top drawn anew; and when a run ends before its last epoch."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cloze.launch.commands import parse
from cloze.launch.finetune.job import read_examples
from cloze.launch.finetune.models import freeze, share_of_backward, start_model, unfreezing
from cloze.launch.finetune.tasks import find_task
from cloze.launch.pretrained.source import find_source
from cloze.launch.run.metrics_file import read_metrics
from cloze.model.config import BertConfig
from cloze.model.families import BY_TYPE
from cloze.model.flops import TokenCounts, training_flops
from cloze.model.tasks import BertForSequenceClassification, HeadConfig
from tests.launch.finetune.running import finetune
from tests.launch.finetune.small import GOOD, sentence, sentiment, write_tsv
from tests.launching import weights
from tests.model.tiny_families import tiny

PAIR = ("index", "sentence1", "sentence2")


def pairs(path, target: str, labels: tuple[str, ...], count: int = 48):
    rng = random.Random(0)
    rows = [(n, *(sentence(rng, rng.choice(GOOD)) for _ in "ab"), labels[n % len(labels)]) for n in range(count)]
    return write_tsv(path, (*PAIR, target), rows)


@pytest.fixture(scope="module")
def mnli(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnli")
    path = pairs(folder / "mnli.tsv", "gold_label", ("contradiction", "entailment", "neutral"))
    finetune("mnli", model, path, path, folder / "run", "--epochs", 2)
    return folder / "run"


def best(run) -> dict[str, torch.Tensor]:
    return weights(run, json.loads((run / "results.json").read_text())["best_step"])


def test_rte_from_mnli_has_its_encoder_and_a_new_head(model, mnli, tmp_path):
    path = pairs(tmp_path / "rte.tsv", "label", ("entailment", "not_entailment"))
    _, said = finetune("rte", mnli, path, path, tmp_path / "run", "--epochs", 1, "--freeze", "encoder")
    assert "initialized: classifier.weight, classifier.bias" in " ".join(said.replace("│", " ").split())
    assert f"validation: found the examples that are learned from ({path}), expected others" in said
    before, after = best(mnli), weights(tmp_path / "run")
    assert before["classifier.weight"].shape == (3, 32) and after["classifier.weight"].shape == (2, 32)
    kept = [name for name in after if name.startswith("bert.") and ".pooler." not in name]
    assert len(kept) == 29 and all(torch.equal(before[name], after[name]) for name in kept)
    assert '"of_another_tool"' in (tmp_path / "run/model/config.json").read_text()
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "run/model" / name).read_bytes() == (model / name).read_bytes(), name


def test_of_a_model_with_its_top_drawn_anew_just_that_differs(mnli, tmp_path):
    path = pairs(tmp_path / "mnli.tsv", "gold_label", ("contradiction", "entailment", "neutral"))

    def start(*options: str, **shape: object) -> dict[str, torch.Tensor]:
        config = parse(
            "finetune",
            ["mnli", "--model", str(mnli), "--train", str(path), "--validation", str(path), "--output", "o", *options],
        ).for_task(find_task("mnli"), 64)
        source = find_source(config)
        source = replace(source, config=replace(source.config, **shape))
        architecture, head, *_ = read_examples(config, find_task("mnli"), source.tokenizer)
        model = start_model(architecture, source, head, config)[0]
        assert model.config.parametrization == "standard", "whatever the source was pretrained with"
        return model.state_dict()

    before, after, again = best(mnli), start("--reinitialize_layers", "1"), start("--reinitialize_layers", "1")
    anew = ("bert.encoder.layers.1.", "bert.pooler.")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith(anew)
    }
    assert all(torch.equal(after[name], again[name]) for name in after)
    other = start("--reinitialize_layers", "1", "--seed", "7")
    drawn = [name for name in other if not torch.equal(other[name], after[name])]
    assert drawn and all(name.startswith(anew) and name.endswith(".weight") for name in drawn), "no bias, no norm"
    pretrained_so = {"parametrization": "mup", "base_hidden_size": 16}
    assert all(torch.equal(before[name], each) for name, each in start(**pretrained_so).items())


def test_patience_ends_a_run_and_the_best_by_a_named_metric_is_reported(model, tmp_path):
    """The loss, of which less is better and which is not the task's first metric; labels that can only be learned by
    heart."""
    rng = random.Random(5)
    rows = [(text, rng.randrange(2)) for text, _ in sentiment(rng, 72)]
    train, validation = (
        write_tsv(tmp_path / f"{name}.tsv", ("sentence", "label"), part)
        for name, part in (("train", rows[:48]), ("dev", rows[48:]))
    )
    results, said = finetune(
        "sst2",
        model,
        train,
        validation,
        tmp_path / "run",
        "--epochs",
        60,
        "--evaluation.metric",
        "loss",
        "--evaluation.patience",
        3,
    )
    measured = {
        line["step"]: line["validation/loss"] for line in read_metrics(tmp_path / "run") if "validation/loss" in line
    }
    steps, losses = list(measured), list(measured.values())
    lowest = int(np.argmin(losses))
    assert results["metric"] == "loss" and results["best_step"] == steps[lowest] > 0
    assert results["steps"] == steps[-1] == steps[lowest + 3] < 60 * 6
    assert results["validation"]["loss"] == pytest.approx(losses[lowest], abs=1e-5)
    assert "not better in 3 evaluations since" in said


def test_flops_count_no_backward_below_the_lowest_layer_that_learns():
    """Against torch's counter: a layer more that learns is a layer's backward more, and with none there is none. The
    lowest one needs no gradient of its input, a product of three widths, which is not left out.
    """
    config = BertConfig.preset("tiny", vocab_size=40, num_hidden_layers=4)
    model = BertForSequenceClassification(config, HeadConfig(("a", "b"), pooling="mean"))
    texts = {
        "input_ids": torch.arange(96) % 40,
        "token_type_ids": torch.zeros(96, dtype=torch.int64),
        "position_ids": torch.arange(48).repeat(2),
        "sequence_offsets": torch.tensor([0, 48, 96], dtype=torch.int32),
    }
    whole, counted, ours = training_flops(config, TokenCounts.of_lengths([48, 48], 0)), [], []
    assert share_of_backward(model) == 1.0
    for kept in range(4, -1, -1):
        freeze(model, f"below_{kept}")
        with FlopCounterMode(display=False) as counter:
            model(**texts, max_sequence_length=48, labels=torch.tensor([0, 1])).loss.backward()
        counted.append(counter.get_total_flops())
        ours.append(whole * (1 + 2 * share_of_backward(model)) / 3)
    input_of_lowest = 2 * 96 * 3 * config.hidden_size**2
    assert counted[:4] == pytest.approx([each - input_of_lowest for each in ours[:4]], rel=1e-3), "but for the head"
    assert counted[4] == pytest.approx(ours[4], rel=1e-3)
    found = [share_of_backward(model) for _ in unfreezing(iter([None] * 6), model, step=0, steps_each=1)]
    assert found == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("kind", BY_TYPE)
def test_what_is_frozen_has_no_backward(kind):
    """Norms and relative positions outside the layers too, which all layers read."""
    model = BertForSequenceClassification(tiny(kind), HeadConfig(("a", "b"), pooling="mean"))
    layers, seen = model.bert.encoder.layers, set()
    for number, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda *_, number=number: seen.add(number))
    for kept in range(len(layers) - 1, -1, -1):
        seen.clear()
        freeze(model, f"below_{kept}")
        model(torch.arange(16)[None] % 8 + 5, labels=torch.tensor([0])).loss.backward()
        assert len(seen) == len(layers) * share_of_backward(model)
    freeze(model, "encoder")
    learning = {name.split(".")[1] for name, each in model.bert.named_parameters("bert") if each.requires_grad}
    assert learning <= {"pooler"}
    model = BertForSequenceClassification(tiny(kind), HeadConfig(("a", "b"), pooling="mean"))
    for learns, _ in enumerate(unfreezing(iter([None] * (len(layers) + 2)), model, step=0, steps_each=1)):
        learning = {name for name, each in model.bert.encoder.named_parameters() if each.requires_grad}
        assert bool(learning) == (learns > 0), "at first only the head"
        assert all(each.requires_grad for each in model.bert.parameters()) == (learns > len(layers))
