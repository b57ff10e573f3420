"""BertConfig refuses by name; presets hold what they claim; FLOPs agree with published figures."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from torch.utils.flop_counter import FlopCounterMode

from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig, HeadConfig, ModelError
from cloze.model.flops import TokenCounts, num_parameters, training_flops, unread_flops
from cloze.model.huggingface import config_to_huggingface, to_huggingface
from cloze.model.initialization import init_weights, init_word_embeddings
from cloze.model.tasks import BertForMaskedLM, BertForSequenceClassification
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model, scramble

PRESETS = Path(__file__).parents[2] / "configs" / "model"


@pytest.mark.parametrize(
    "fields",
    [
        dict(hidden_size=30),
        dict(num_hidden_layers=0),
        dict(hidden_dropout_prob=1.0),
        dict(attention_probs_dropout_prob=-0.1),
        dict(pad_token_id=500),
        dict(add_cross_attention=True),
        dict(position_embedding="rotary", hidden_size=36, num_attention_heads=4),
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


def test_flops_are_those_of_the_published_comparison():
    base, large = (
        BertConfig(vocab_size=30522),
        BertConfig(
            vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        ),
    )
    # GF a sequence of 128 with 20 predictions and of 512 with 80
    for config, short, long in ((base, 69.9, 301.4), (large, 240.6, 1020.5)):
        assert training_flops(config, TokenCounts.of_lengths([128], 20)) / 1e9 == pytest.approx(short, abs=0.1)
        assert training_flops(config, TokenCounts.of_lengths([512], 80)) / 1e9 == pytest.approx(long, abs=0.1)
    parts = (TokenCounts.of_lengths([128], 20), TokenCounts.of_lengths([512], 80))
    assert TokenCounts.of_lengths([128, 512], 100) == TokenCounts(640, 128**2 + 512**2, 100)
    assert training_flops(base, TokenCounts.of_lengths([128, 512], 100)) == sum(
        training_flops(base, part) for part in parts
    )


@pytest.mark.parametrize("gated", [False, True])
def test_flops_are_what_torch_counts_of_a_step(gated):
    """Matrix products as they are dispatched, the pooler's and the pairs' aside; sequences fill their places."""
    config = dataclasses.replace(
        TINY, gated_feed_forward=gated, vocab_padding_multiple=1, pooler=False, decoder_bias=False
    )  # whose gradient is a product too
    model, padded = pretraining_model(config), batch(config, (48, 48))
    flat = concatenate(padded)
    num_tokens, num_masked, num_pairs = len(flat["input_ids"]), len(flat["labels"]), 2
    with FlopCounterMode(display=False) as counter:
        model(**flat).loss.backward()
    counts = TokenCounts.of_micro_batch(flat)
    assert counts == TokenCounts(96, 2 * 48**2, num_masked)
    expected = training_flops(config, counts)
    expected -= unread_flops(config, num_tokens, num_masked + num_pairs)
    assert counter.get_total_flops() == expected + 6 * num_pairs * 2 * config.hidden_size


def test_initial_weights_are_those_of_the_table():
    config = dataclasses.replace(TINY, hidden_size=128, intermediate_size=256, vocab_size=1000)
    model, again, other = (BertForPreTraining(config) for _ in range(3))
    init_weights(model, 1)
    torch.manual_seed(99)
    init_weights(again, 1)
    init_weights(other, 2)
    for (name, parameter), twin, stranger in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(parameter, twin), name
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert not torch.equal(parameter, stranger), name
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2 if parameter.numel() < 300 else 0.05), name
    word = model.bert.embeddings.word.weight
    assert (word[config.pad_token_id] == 0).all() and (word[config.vocab_size :] == 0).all()


def test_a_learned_sum_of_layers_starts_with_equal_shares():
    model = scramble(BertForSequenceClassification(TINY, HeadConfig(layers="weighted", pooling="mean")))
    init_weights(model, 0)
    assert (model.mix.weights == 0).all() and model.mix.scale.item() == 1


def test_embeddings_may_start_wider_than_linear_maps():
    model = BertForPreTraining(preset("d2l", vocab_size=1000))
    init_weights(model, 0)
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            expected = 1.0 if ".embeddings." in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1 if parameter.numel() < 300 else 0.05), name


def test_word_embeddings_may_start_from_a_word2vec_text_file(tmp_path):
    config = dataclasses.replace(TINY, hidden_size=4, num_attention_heads=1)
    model = BertForPreTraining(config)
    init_weights(model, 0)
    before = model.bert.embeddings.word.weight.clone()
    path = tmp_path / "vectors.txt"
    path.write_text("3 4\ncat 4 3 2 1\ncat 1 2 3 4\nunknown 9 9 9 9\ndog 5 6 7 8.5\n")
    assert init_word_embeddings(model, path, {"cat": 7, "dog": 9, "cow": 11}) == 2
    after = model.masked_lm.decoder.weight  # tied
    assert after[7].tolist() == [1, 2, 3, 4] and after[9].tolist() == [5, 6, 7, 8.5]
    untouched = [row for row in range(len(before)) if row not in (7, 9)]
    assert torch.equal(after[untouched], before[untouched])
    path.write_text("cat 1 2 3\n")
    with pytest.raises(ModelError, match=r"vectors.txt:1: found 3 numbers"):
        init_word_embeddings(model, path, {"cat": 7})
    path.write_text("cat 1 2 x 4\n")
    with pytest.raises(ModelError, match=r"vectors.txt:1"):
        init_word_embeddings(model, path, {"cat": 7})
    path.write_text("nothing 1 2 3 4\n")
    with pytest.raises(ModelError, match="none of the 1 tokens"):
        init_word_embeddings(model, path, {"cat": 7})
