"""What Inductor and Triton make of the layers for a GPU: their own kernels, none of which is run; graphs are counted.

The first are skipped without Triton, which torch's builds for a CPU do not bring: `pip install triton`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cloze.launch.tools.planning.roofline import fuse
from cloze.launch.tools.planning.trace import ModelRun, TracedBatch, trace_micro_step
from cloze.model.config import BertConfig
from tests.gpu.cases import COMPILED_LENGTHS, Compiled, Graphs


def planned_bytes(model: str, layers: int) -> int:
    """Bytes that `cloze plan` counts for all that is no product and no attention, in the layers."""
    lengths = COMPILED_LENGTHS[-1]
    config = replace(BertConfig.preset(model, vocab_size=1000), num_hidden_layers=layers)
    kernels = fuse(trace_micro_step(ModelRun(config), TracedBatch(lengths, 76 * len(lengths))))
    return sum(each.bytes for each in kernels if each.in_layer and each.kind in ("pointwise", "other"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["base", "large"])
def test_the_plan_counts_the_bytes_that_inductors_kernels_move(compiled, model):
    """Of one layer amid the others, forward and backward: what three layers move and two do not."""
    two, three = (compiled(Compiled(model, layers)) for layers in (2, 3))
    assert two["graphs"] == three["graphs"] == 2, "the last layer, which reads some tokens, and the others"
    found = sum(size for _, size in three["started"]) - sum(size for _, size in two["started"])
    planned = planned_bytes(model, 3) - planned_bytes(model, 2)
    assert planned == pytest.approx(found, rel=0.05)
    # What took a pass of its own before: sums made again, a residual's gradient added, parts brought together.
    backward = Counter(name for name, _ in three["started"]) - Counter(name for name, _ in two["started"])
    assert not [name for name in backward if "stack" in name or "cat" in name]
    large = [name for name, size in three["started"] if size > 1e6 and "addcmul" in name]
    assert len(large) == 2 * 3, "residuals are added in forward alone"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_triton_compiles_the_kernels_for_ampere_and_hopper(compiled, capability):
    found = compiled(Compiled("base", 2, capability, binaries=True))
    assert found["binaries"].keys() >= {name for name, _ in found["started"]}
    assert len(found["binaries"]) > 20 and min(found["binaries"].values()) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("next_tokens", [False, True])
def test_the_trial_of_micro_batches_compiles_the_graphs_of_the_run(worker, next_tokens):
    """Of the last layer and the others, with the weights of a step; also where a micro-batch is as many sequences as
    one has tokens. Evaluation, which keeps nothing for backward, has its own two, whatever the lengths.
    """
    tried, trained, evaluated, again = worker(Graphs(next_tokens))["graphs"]
    assert tried == trained == (4 if next_tokens else 2)
    assert evaluated == again == trained + 2
