"""What ELECTRA has beside its classes, which test_families.py compares with those of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from cloze.model.config import BertConfig, ModelError
from cloze.model.families import family_of
from cloze.model.flops import TokenCounts, num_parameters, training_flops
from cloze.model.huggingface import load_note
from cloze.model.initialization import init_weights
from cloze.model.tasks import BertForReplacedTokenDetection, BertForSequenceClassification

CONFIG = BertConfig(
    vocab_size=61,
    hidden_size=32,
    embedding_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    pooler=False,
    initializer_range=0.2,
)


def drawn(kind, config=CONFIG):
    model = kind(config).eval()
    init_weights(model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # which would all be 0 or 1
                parameter.normal_(0, 0.3)
    return model


def test_embeddings_of_the_encoders_width_are_an_electras_too(tmp_path):
    config = replace(CONFIG, embedding_size=CONFIG.hidden_size)
    model = drawn(BertForReplacedTokenDetection, config)
    model.save(tmp_path)
    theirs, loading = transformers.ElectraForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    ids = torch.randint(5, 61, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs.eval()(ids).logits, atol=1e-5, rtol=0)
    assert BertForReplacedTokenDetection.from_folder(tmp_path).config == config


def test_what_electra_lacks_in_transformers_is_in_our_own_format(tmp_path):
    drawn(BertForSequenceClassification).save(tmp_path / "classifier")
    assert load_note(tmp_path / "classifier", "model_type") == "cloze"
    assert BertForSequenceClassification.from_folder(tmp_path / "classifier").config == CONFIG
    drawn(BertForReplacedTokenDetection, replace(CONFIG, embedding_size=None)).save(tmp_path / "detector")
    assert load_note(tmp_path / "detector", "model_type") == "cloze"
    assert family_of(replace(CONFIG, pooler=True)) is None and family_of(replace(CONFIG, hidden_act="relu")) is None


def test_a_configuration_that_leaves_sizes_out_is_electra_smalls(tmp_path):
    transformers.ElectraForPreTraining(transformers.ElectraConfig(num_hidden_layers=1)).save_pretrained(tmp_path)
    config = BertForReplacedTokenDetection.from_folder(tmp_path).config
    assert (config.hidden_size, config.embedding_size, config.num_attention_heads, config.intermediate_size) == (
        256,
        128,
        4,
        1024,
    )
    with pytest.raises(ModelError, match="mlm_head: linear has no map"):
        replace(CONFIG, mlm_head="linear")


def test_the_preset_is_electra_small():
    config = BertConfig.preset("electra-small", vocab_size=30522, vocab_padding_multiple=1)
    theirs = transformers.ElectraForPreTraining(transformers.ElectraConfig())  # whose defaults are
    assert num_parameters(BertForReplacedTokenDetection(config)) == theirs.num_parameters() == 13_549_057
    # Forward and backward of a token in two sequences of 100, 20 of them predicted, by its matrices.
    layer = 4 * 256**2 + 2 * 256 * 1024
    expected = 6 * 200 * (12 * layer + 128 * 256) + 12 * 12 * 256 * 2 * 100**2 + 6 * 20 * 128 * (256 + 30522)
    assert training_flops(config, TokenCounts.of_lengths([100, 100], 20)) == expected
