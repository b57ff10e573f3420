"""Initial weights."""

import dataclasses

import pytest
import torch
import transformers

from cloze.model.bert import BertForPreTraining
from cloze.model.config import ModelError
from cloze.model.initialization import init_weights, init_word_embeddings
from cloze.model.problems import HeadConfig
from cloze.model.tasks import BertForMaskedLM, BertForSequenceClassification
from cloze.model.weight_names import to_huggingface
from tests.model.model_batches import TINY, scramble
from tests.model.test_config import preset
from tests.model.test_variants import MODERN


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
    # The empty word is one of gensim's.
    path.write_text("\ufeff5 4\ncat 4 3 2 1\ncat 1 2 3 4\n 9 9 9 9\nunknown 9 9 9 9\ndog 5 6 7 8.5\n \n\n")
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
    for wrong in ("nan", "inf", "1e39", "1_0", "٣"):
        path.write_text(f"cat 1 2 {wrong} 4\n", encoding="utf-8")
        with pytest.raises(ModelError, match=r"vectors.txt:1: .*, expected a word and numbers in fp32's range"):
            init_word_embeddings(model, path, {"cat": 7})
    path.write_text("999 4\ncat 1 2 3 4\n")
    with pytest.raises(ModelError, match="found 1 words, expected 999, as its first line says"):
        init_word_embeddings(model, path, {"cat": 7})
    path.write_text("\ufeffcat 1 2 3 4\n", encoding="utf-8")
    assert init_word_embeddings(model, path, {"cat": 7}) == 1
    spaced = ("cat dog@x 9 9 9 9", "cat 1 2 3 4", "cat . . 9 9 9 9", "cat 3 9 9 9 9")  # words with spaces, as of GloVe
    path.write_text("\n".join(["a 9 9 9 9", *spaced]))
    assert init_word_embeddings(model, path, {"cat": 7}) == 1 and after[7].tolist() == [1, 2, 3, 4]
    path.write_text("a 9 9 9 9\ncat  1 2 3 4\n")  # two spaces
    with pytest.raises(ModelError, match=r"vectors.txt:2"):
        init_word_embeddings(model, path, {"cat": 7})
    path.write_text("nothing 1 2 3 4\n")
    with pytest.raises(ModelError, match="none of the 1 tokens"):
        init_word_embeddings(model, path, {"cat": 7})


def test_megatrons_initial_weights_are_those_of_the_reference():
    """ModernBERT's, drawn by transformers from another generator: equal deviations, cut off at the same bounds."""
    shape = dataclasses.replace(
        MODERN,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        vocab_size=1000,
        tie_word_embeddings=False,
        initialization="megatron",
        initializer_cutoff=2.0,
    )
    ours = BertForMaskedLM(shape)
    init_weights(ours, 5)
    theirs = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=192,
            num_attention_heads=4,
            num_hidden_layers=5,
            tie_word_embeddings=False,
            initializer_cutoff_factor=2.0,
            pad_token_id=0,
        )
    ).state_dict()
    compared = 0
    for name, tensor in to_huggingface(ours.state_dict(), shape).items():
        if tensor.dim() == 2:
            assert float(tensor.std()) == pytest.approx(float(theirs[name].std()), rel=0.05), name
            assert float(tensor.abs().max()) == pytest.approx(float(theirs[name].abs().max()), rel=0.02), name
            compared += 1
    assert compared == 5 * 4 + 3
