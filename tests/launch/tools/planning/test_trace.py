"""A step's kernels, counted without numbers."""

from dataclasses import replace

import torch

from cloze.launch.tools.planning.trace import Batch, ModelRun, trace_micro_step
from cloze.model.config import BertConfig
from cloze.model.flops import training_flops

SMALL = BertConfig(vocab_size=8192, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)



def test_the_trace_counts_what_the_mathematics_needs():
    """Products and attention of full tiles are the model's FLOPs, less what nobody reads of the last layer."""
    config = replace(SMALL, num_hidden_layers=12)
    batch = Batch((128,) * 8, 8 * 19)
    trace = trace_micro_step(ModelRun(config), batch)
    needed = training_flops(config, batch.lengths, batch.masked)
    recomputed = 2 * config.hidden_size * 128**2 * 8 * 12  # scores, in flash attention's backward
    counted = sum(each.flops for each in trace.kernels) - recomputed
    assert 0.90 * needed < counted < needed
    names = {each.name for each in trace.kernels}
    assert {"_flash_attention_forward", "_flash_attention_backward"} <= names, "as on a GPU"


def test_casts_and_checkpointing_are_seen():
    """A CPU casts each weight where it is used, a GPU all at once; at stage 1 there is nothing to cast."""
    batch = Batch((128,) * 8, 8 * 19)
    cpu, gpu, halved, again = (trace_micro_step(run, batch) for run in (
        ModelRun(SMALL, on_gpu=False), ModelRun(SMALL), ModelRun(SMALL, weights=torch.bfloat16, autocast=None),
        ModelRun(SMALL, gradient_checkpointing="all")))
    casts = [sum(each.name == "_to_copy" for each in trace.kernels) for trace in (cpu, gpu, halved)]
    assert casts[0] > casts[1] + 20 * SMALL.num_hidden_layers and casts[1] < casts[2] + SMALL.num_hidden_layers
    assert max(each.tensors for each in gpu.kernels if each.name == "_foreach_copy_") > 4 * SMALL.num_hidden_layers
    assert again.peak_bytes < gpu.peak_bytes
    assert sum(each.flops for each in again.kernels) > 1.2 * sum(each.flops for each in gpu.kernels)
