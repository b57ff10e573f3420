"""Bytes of memory by ZeRO stage."""

from cloze.launch.tools.planning.memory import memory, traffic
from cloze.model.config import BertConfig

SMALL = BertConfig(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def test_stages_partition_what_they_say():
    """Rajbhandari et al. 2020, with fp32 sums of gradients: 16 bytes a weight at stage 0; at 1 gradients stay whole,
    at 2 those of a micro-step. (tests/gpu/test_memory.py holds this to the engine itself.)"""
    count, options = 1_000_000, {"precision": "bf16", "states": 8_000_000, "on_gpu": False}
    stages = [memory(stage, count, 64, 0, **options) for stage in range(4)]
    assert stages[0].weights + stages[0].gradients + stages[0].moments == 16 * count
    own = 15625
    assert stages[1].weights == 2 * count + 4 * own and stages[1].gradients == 6 * count
    assert stages[1].moments == 8 * own and stages[2].gradients == 2 * count + 4 * own
    assert stages[0].total > stages[1].total > stages[2].total
    sent = [traffic(stage, count, 64, 8, precision="bf16")[0] for stage in range(4)]
    assert sent[2] > 3 * sent[0], "stage 2 reduces in every micro-step"
    assert traffic(0, count, 1, 8, precision="bf16") == (0.0, 0)
