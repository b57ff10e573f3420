"""BertConfig refuses by name; presets hold what they claim; FLOPs agree with published figures."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig, ModelError
from cloze.model.flops import num_parameters
from cloze.model.huggingface import config_to_huggingface
from cloze.model.initialization import init_weights
from cloze.model.tasks import BertForMaskedLM
from cloze.model.weight_names import to_huggingface
from tests.model.model_batches import TINY, batch, concatenate

PRESETS = Path(__file__).parents[2] / "configs" / "model"


@pytest.mark.parametrize(
    "fields",
    [
        dict(hidden_size=30),
        dict(num_hidden_layers=0),
        dict(num_hidden_layers=10**6),  # where all share their weights, they were built for minutes
        dict(num_key_value_heads=3),
        dict(hidden_dropout_prob=1.0),
        dict(attention_probs_dropout_prob=-0.1),
        dict(pad_token_id=500),
        dict(add_cross_attention=True),
        dict(position_embedding="rotary", hidden_size=36, num_attention_heads=4),
        dict(rotary_theta=0),  # with which all rotations are NaN
        dict(local_rotary_theta=-10.0),
        dict(first_attention_norm=False),
        dict(gate_bias=False),
        dict(gate_bias=False, gated_feed_forward=True, linear_bias=False),
        dict(local_attention_window=5),
        dict(segment_padding_index=2, type_vocab_size=2),
        dict(segment_padding_index=3, type_vocab_size=3),
        dict(position_embedding="none", position_initializer_range=1.0),
        dict(position_initializer_range=-1.0),
        dict(embedding_initializer_range=-1.0),
        dict(position_embedding="scaled_sinusoidal", hidden_size=33, num_attention_heads=3),
        dict(position_embedding="rotry"),
        dict(normalization="layernorm"),
        dict(norm_position="Pre"),
        dict(mlm_head="lin"),
        dict(hidden_act="mish"),
        dict(pooler_activation=None),
        dict(parametrization="mup", base_hidden_size=20),  # no multiple of the head size 8
        dict(parametrization="mup", base_num_layers=0),
        dict(parametrization="mup", initialization="megatron"),
        dict(parametrization="mup", mlm_head="linear"),
        dict(parametrization="mup", embedding_size=16),
    ],
)
def test_wrong_fields_are_refused_by_name(fields):
    with pytest.raises(ModelError, match=r"^model\.") as caught:
        dataclasses.replace(TINY, **fields)
    assert any(name in str(caught.value) for name in fields)
    assert "\n" not in str(caught.value)


def test_models_are_refused_by_name():
    with pytest.raises(ModelError, match="vocab_size"):
        BertForPreTraining(BertConfig())
    with pytest.raises(ModelError, match="attention_kernel"):
        BertForPreTraining(TINY, attention_kernel="fast")
    with pytest.raises(ModelError, match="gradient_checkpointing"):
        BertForPreTraining(TINY, gradient_checkpointing="every_0")
    decoder = dict(is_decoder=True, add_cross_attention=True)
    for fields in (dict(position_embedding="alibi"), dict(hidden_size=36), decoder):  # 36: heads of 9
        with pytest.raises(ModelError, match="varlen"):
            BertForPreTraining(dataclasses.replace(TINY, **fields), attention_kernel="varlen")
    model = BertForPreTraining(TINY)
    with pytest.raises(ModelError, match="max_position_embeddings"):
        model(torch.zeros(1, 49, dtype=torch.int64))
    with pytest.raises(ModelError, match="attention_mask"):
        model(torch.zeros(1, 4, dtype=torch.int64), attention_mask=torch.ones(1, 5))
    with pytest.raises(ModelError, match="attention_mask"):
        model(torch.zeros(1, 4, dtype=torch.int64), attention_mask=torch.ones(1, 3, 4))
    with pytest.raises(ModelError, match="attention_mask.* sequence_offsets"):
        model(torch.zeros(4, dtype=torch.int64), sequence_offsets=torch.tensor([0, 4]), attention_mask=torch.ones(4))
    with pytest.raises(ModelError, match="exactly one"):
        model()
    with pytest.raises(ModelError, match="CUDA"):
        BertForPreTraining(TINY, attention_kernel="varlen")(torch.zeros(1, 4, dtype=torch.int64))


def test_a_preset_names_a_field_that_there_is_not():
    with pytest.raises(ModelError, match="^preset: found 'hiden_size', expected .*did you mean hidden_size[?]$"):
        BertConfig.preset("base", hiden_size=3)
    with pytest.raises(ModelError, match="^preset: found 'zzz', expected fields of BertConfig: vocab_size, .*, pooler"):
        BertConfig.preset("base", zzz=3)


def preset(name: str, **fields) -> BertConfig:
    return BertConfig(**yaml.safe_load((PRESETS / f"{name}.yaml").read_text()) | fields)


@pytest.mark.parametrize("name", ["tiny", "mini", "small", "medium", "base", "large"])
def test_presets_of_bert_are_as_large_as_their_counterparts_in_transformers(name):
    config = preset(name, vocab_size=30522)
    with torch.device("meta"):
        exported = to_huggingface(BertForPreTraining(config).state_dict(), config)
        values = config_to_huggingface(config, "", torch.float32)
        theirs = transformers.BertForPreTraining(transformers.BertConfig(**values))
    assert sum(tensor.numel() for tensor in exported.values()) == num_parameters(theirs)


WHOLE = ("tiny", "mini", "d2l", "tutorial")  # so small that they train as they are, but for the vocabulary
LENGTHS = {"tutorial": (3, 20, 17, 9), "modern": (3, 150)}  # the one's positions, the other's window


@pytest.mark.parametrize("name", [path.stem for path in sorted(PRESETS.glob("*.yaml"))])
def test_every_preset_builds_trains_and_counts_its_parameters(name):
    with torch.device("meta"):
        whole = BertForPreTraining(preset(name, vocab_size=15 if name == "tutorial" else 30522))
    print(f"{name}: {num_parameters(whole):,} parameters")
    few = {} if name in WHOLE else {"num_hidden_layers": 2 if name == "modern" else 1}  # its first is global
    config = preset(name, vocab_size=300, **few)
    model = BertForPreTraining(config).train()
    init_weights(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3 / config.hidden_size)
    padded = batch(dataclasses.replace(TINY, vocab_size=300), LENGTHS.get(name, (3, 48, 17, 9)))
    if config.segment_padding_index == 0:
        padded["token_type_ids"] += padded["attention_mask"]
    flat = concatenate(padded)
    flat["input_ids"][flat["masked_positions"]] = 4
    losses = []
    for step in range(4):
        loss = model(**flat, dropout_seed=step).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # The bare head of crammed, tied to the embeddings, at first guesses the mask that it reads.
    assert losses[0] == pytest.approx(math.log(300) + math.log(2), abs=5.0 if name == "crammed" else 1.0)
    assert losses[-1] < losses[0] - 1, losses


def test_the_window_of_the_modern_preset_cuts():
    model = BertForPreTraining(preset("modern", vocab_size=300, num_hidden_layers=2)).eval()
    init_weights(model, 0)
    everywhere, local = model(torch.full((1, 150), 7), output_attentions=True).attentions
    distance = (torch.arange(150)[:, None] - torch.arange(150)).abs()
    assert (everywhere > 0).all() and torch.equal(local[0, 0] > 0, distance <= 64)


def test_published_sizes_of_the_variants():
    def count(name, **fields):
        with torch.device("meta"):
            return num_parameters(BertForMaskedLM(preset(name, vocab_padding_multiple=1, **fields)))

    # As transformers counts ModernBertForMaskedLM at its defaults, which are ModernBERT-base's.
    with torch.device("meta"):
        theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig())
    assert count("modern", vocab_size=50368) == num_parameters(theirs)
    # MosaicBERT's maps as mosaicml/examples has them (its paper says 137 M): all but the gated one have a bias.
    linear, norm = lambda inputs, outputs: inputs * outputs + outputs, 2 * 768
    layer = linear(768, 3 * 768) + linear(768, 768) + norm + 768 * 2 * 3072 + linear(3072, 768) + norm
    head = linear(768, 768) + norm + 30528
    assert count("mosaic", vocab_size=30528) == 30528 * 768 + 2 * 768 + norm + 12 * layer + head
    assert count("academic-24h", vocab_size=30528) / 1e6 == pytest.approx(336, abs=2)
    assert count("crammed", vocab_size=32768) / 1e6 == pytest.approx(120, abs=1)
