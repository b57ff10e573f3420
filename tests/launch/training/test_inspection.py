"""Norms of each layer against a plain loop, at every ZeRO stage; the profiler of a run."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cloze.launch.config import PretrainConfig
from cloze.launch.system import distributed
from cloze.launch.training.inspection import Inspector, layer_of, start_quietly
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.shards.reader import ShardReader
from tests.launching import NO_DROPOUT, curve, train
from tests.synthetic import make_shards


def test_parts_of_a_model():
    names = {
        "bert.encoder.layers.3.attention.qkv.weight": "layer_03",
        "bert.embeddings.norm.bias": "embeddings",
        "masked_lm.bias": "head",
        "bert.pooler.weight": "head",
    }
    assert {name: layer_of(name) for name in names} == names


def plain(data) -> dict[str, float]:
    """Gradient before clipping, weight and update of the second step; the first has rate 0 by its warmup."""
    model = BertForPreTraining(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )
    init_weights(model, 42)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.01},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=3e-3,
        eps=1e-6,
    )
    stream = BatchStream(
        ShardReader(data, "train"), global_batch_size=16, streams=16, micro_batch_size=16, rank=0, world_size=1, seed=42
    )
    squares = {}
    for rate in (0.0, 3e-3):
        output = model(**next(stream).micro_batches[0])
        optimizer.zero_grad()
        (output.mlm_losses.mean() + output.next_sentence_losses.mean()).backward()
        before = {name: (p.detach().clone(), p.grad.clone()) for name, p in named}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        squares = {}
        for name, p in named:
            weight, gradient = before[name]
            parts = torch.stack([t.double().square().sum() for t in (gradient, weight, p.detach() - weight)])
            squares[layer_of(name)] = squares.get(layer_of(name), 0) + parts
    stream.close()
    scalars = {}
    for layer, parts in squares.items():
        gradient, weight, update = parts.sqrt().tolist()
        scalars |= {
            f"gradient_norm/{layer}": gradient,
            f"weight_norm/{layer}": weight,
            f"update_ratio/{layer}": update / weight,
        }
    return scalars


@pytest.mark.parametrize("stage", ["0", "2", *(pytest.param(stage, marks=pytest.mark.slow) for stage in "13")])
def test_every_layer_is_that_of_a_plain_loop(tmp_path, stage):
    data = make_shards(tmp_path / "data")
    train(
        data,
        tmp_path / "run",
        *NO_DROPOUT,
        "--train.max_steps",
        "2",
        "--schedule.name",
        "constant",
        "--schedule.warmup_steps",
        "1",
        "--train.gradient_clipping",
        "0.1",
        "--monitor.inspect_every_steps",
        "2",
        "--zero.stage",
        stage,
        processes=2,
    )
    (line,) = [line for line in curve(tmp_path / "run") if "weight_norm/head" in line]
    expected = plain(data)
    assert {"step", *expected} == set(line)
    for name, value in expected.items():
        assert line[name] == pytest.approx(value, rel=2e-3 if "update" in name else 1e-5), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_cpus_are_inspected_with_a_profiler(monkeypatch, device):
    """On another device (here one without memory) starting one would wait for it, and slow it down afterwards."""
    started, written = [], []

    class Profiler:
        profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: []))

        def __init__(self, **options):
            started.append(options)

        start = stop = lambda self: None

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(distributed, "reduce_sum", lambda values: values)
    engine = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        device=torch.device(device),
        stage=1,
        watch_update=lambda before, after: nullcontext(),
    )
    curves = SimpleNamespace(write=lambda state, scalars, progress: written.append(scalars))
    inspector = Inspector(engine, PretrainConfig("", ""), 2, curves, SimpleNamespace(running=False))
    inspector.before_step(SimpleNamespace(state=SimpleNamespace(step=99)))
    skipped = SimpleNamespace(gradient_norm=float("inf"))
    inspector.on_step(SimpleNamespace(state=None, outcome=skipped))
    assert len(started) == (device == "cpu")
    assert [set(scalars) for scalars in written] == [{"speed/communication_share"} if device == "cpu" else set()]


def test_a_profiler_of_one_cycle_says_nothing_of_others(recwarn):
    """torch 2.12 warns of what a second cycle forgets whenever a first one begins."""

    def start():
        warnings.warn("Warning: Profiler clears events at the end of each cycle.", stacklevel=2)
        warnings.warn("Profiler won't be using warmup", stacklevel=2)

    start_quietly(SimpleNamespace(start=start))
    assert [str(each.message) for each in recwarn] == ["Profiler won't be using warmup"]
