"""A step's kernels, counted without numbers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from cloze.launch.config import OptimizerConfig, PretrainConfig
from cloze.launch.engine.optimizers import build_optimizer
from cloze.launch.pretrain.objectives.factory import make_objective
from cloze.launch.tools.planning.trace import (
    ModelRun,
    TracedBatch,
    _Recorder,
    record,
    trace_micro_step,
    trace_optimizer,
)
from cloze.model import heads
from cloze.model.config import BertConfig
from cloze.model.families import BY_TYPE
from cloze.model.flops import training_flops, unread_flops
from tests.model.tiny_families import tiny

SMALL = BertConfig(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def test_the_trace_counts_what_the_mathematics_needs():
    """Products and attention of full tiles are the model's FLOPs, less outputs of the last layer that no head reads."""
    config = replace(SMALL, num_hidden_layers=12)
    batch = TracedBatch((128,) * 8, 8 * 19)
    trace = trace_micro_step(ModelRun(config), batch)
    needed = training_flops(config, batch.counts)
    recomputed = 2 * config.hidden_size * 128**2 * 8 * 12  # scores, in flash attention's backward
    counted = sum(each.flops for each in trace.kernels) - recomputed
    assert 0.90 * needed < counted < needed
    names = {each.name for each in trace.kernels}
    assert {"_flash_attention_forward", "_flash_attention_backward"} <= names, "as on a GPU"


@pytest.mark.parametrize("kind", BY_TYPE)
def test_the_products_of_every_family_are_counted(kind):
    """On a CPU, where nothing is computed again. DeBERTa's products are with all 2 S - 1 distances of S tokens, and it
    maps the distances.
    """
    config, batch = tiny(kind, max_position_embeddings=64), TracedBatch((64,) * 4, 40)
    if config.local_attention_window:
        config = replace(config, local_attention_window=128)
    width, layers = config.hidden_size, config.num_hidden_layers
    needed = training_flops(config, batch.counts) - unread_flops(config, batch.tokens, batch.masked + 4)
    distances = 6 * width * layers * len(config.relative_terms)
    needed += distances * (batch.tokens * 127 - batch.counts.squares)
    needed += bool(distances) * 6 * layers * 2 * config.relative_span * 3 * width**2
    counted = sum(each.flops for each in trace_micro_step(ModelRun(config, on_gpu=False), batch).kernels)
    assert needed <= counted < 1.005 * needed, "the pooler and pairs too"


@pytest.mark.parametrize(("on_gpu", "objective"), [(True, "masked"), (False, "masked"), (True, "span_boundary")])
def test_chunks_of_the_loss_are_traced_once_and_counted_each(on_gpu, objective, monkeypatch):
    """Whole ones, and a last one with fewer rows. Those of a second head have the outputs of the first beside them."""
    config = replace(SMALL, num_hidden_layers=1)
    own = make_objective(PretrainConfig(data="data", output="run", model=config, objective=objective))
    run, batch = ModelRun(config, on_gpu=on_gpu, objective=own), TracedBatch((128,) * 8, 8 * 64)
    chunk = 200 * SMALL.vocab_size
    monkeypatch.setattr(heads, "_CHUNK_ELEMENTS", {False: chunk, True: chunk})
    called, fill = [], heads.fill_losses
    monkeypatch.setattr(heads, "fill_losses", lambda *args: [called.append(args[0]), fill(*args)])
    found = trace_micro_step(run, batch)
    assert len(called) == 2, "of both heads"
    monkeypatch.setattr(_Recorder, "once_a_size", lambda _, work: work)
    whole = trace_micro_step(run, batch)
    assert len(called) == 2 + 3 * (1 + (objective == "span_boundary"))
    bare = [
        [replace(each, reads=_sizes(each.reads), writes=_sizes(each.writes)) for each in trace.kernels]
        for trace in (found, whole)
    ]
    assert bare[0] == bare[1] and (found.peak_bytes, found.forward) == (whole.peak_bytes, whole.forward)


def _sizes(storages):
    return tuple(size for _, size in storages)


def test_kernels_of_layers_are_known():
    kernels = trace_micro_step(ModelRun(replace(SMALL, num_hidden_layers=2)), TracedBatch((16,) * 4, 8)).kernels
    names = {inside: {each.name for each in kernels if each.in_layer == inside} for inside in (True, False)}
    assert {"gelu_backward", "_flash_attention_forward", "native_layer_norm_backward", "addmm"} <= names[True]
    assert {"embedding", "embedding_dense_backward", "_foreach_copy_", "_softmax"} <= names[False] - names[True]
    assert sum(each.in_layer and each.name == "sum" for each in kernels) == 6 * 2, "biases: three of the qkv's parts"


def test_of_a_table_the_rows_that_are_taken_are_read():
    table, rows = torch.zeros(1000, 8), torch.arange(10)
    with record(SMALL, (1,)) as trace:
        chosen = table.index_select(0, rows)
        table.scatter_add_(0, rows[:, None], chosen[:, :1])
        chosen.copy_(torch.empty(10, 8))
        chosen.new_full((), 1.0)
    taken, added, copied, filled = (each.bytes for each in trace.kernels)
    assert taken == 320 + 80 + 320 and added <= 4 * 80 and copied == 2 * 320 and filled == 4


def test_casts_and_checkpointing_are_seen():
    """A CPU casts each weight where it is used, a GPU all at once; at stage 1 there is nothing to cast."""
    batch = TracedBatch((128,) * 8, 8 * 19)
    cpu, gpu, halved, again = (
        trace_micro_step(run, batch)
        for run in (
            ModelRun(SMALL, on_gpu=False),
            ModelRun(SMALL),
            ModelRun(SMALL, weights=torch.bfloat16, autocast=None),
            ModelRun(SMALL, gradient_checkpointing="all"),
        )
    )
    casts = [sum(each.name == "_to_copy" for each in trace.kernels) for trace in (cpu, gpu, halved)]
    assert casts[0] > casts[1] + 20 * SMALL.num_hidden_layers and casts[1] < casts[2] + SMALL.num_hidden_layers
    assert max(each.tensors for each in gpu.once) > 4 * SMALL.num_hidden_layers and not halved.once
    assert again.peak_bytes < gpu.peak_bytes
    assert sum(each.flops for each in again.kernels) > 1.2 * sum(each.flops for each in gpu.kernels)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_muon_shares_products_of_small_matrices_on_a_gpu_alone(on_gpu):
    """15 for each shape, however many layers, or for each weight."""
    build = partial(build_optimizer, config=OptimizerConfig(name="muon"), learning_rate=1e-3)
    tiny = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, intermediate_size=128)
    found = []
    for layers in (2, 6):
        trace, _ = trace_optimizer(ModelRun(replace(tiny, num_hidden_layers=layers), on_gpu=on_gpu), build)
        found.append(sum(kernel.kind == "product" for kernel in trace.kernels))
    assert found == ([60, 60] if on_gpu else [120, 360])
