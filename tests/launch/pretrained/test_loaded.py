"""Models that are loaded."""

import json
from contextlib import nullcontext

import pytest
from tokenizers.processors import TemplateProcessing

from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from cloze.model.problems import HeadConfig
from cloze.model.tasks import BertForSequenceClassification
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.backends import put_around_texts
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.launch.tiny_models import tokenizer


def test_a_head_that_is_its_embeddings_comes_back_from_our_own_format(tmp_path):
    ours, text = tokenizer(), "the [MASK] sat on the mat ."
    ours.save(tmp_path)
    config = BertConfig(
        vocab_size=ours.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        mlm_head="linear",
        decoder_bias=False,
        pooler=False,
        type_vocab_size=0,
    )
    model = BertForPreTraining(config).eval()
    init_weights(model, 0)
    model.save(tmp_path, tmp_path)
    assert Predictor.from_folder(tmp_path).fill_mask(text) == Predictor(LoadedModel(model, ours)).fill_mask(text)


def test_a_pair_for_a_model_whose_tokenizer_joins_pairs_in_another_way_is_refused(capsys, tmp_path):
    """RoBERTa's puts two separators between them; not once it has been fine-tuned on pairs here, which changes that."""
    ours = tokenizer()
    config = BertConfig(
        vocab_size=ours.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    model = BertForPreTraining(config)
    assert len(LoadedModel(model, ours).encoder.encode("the cat", "the mat")) == 7
    first, last = (ours.names[role] for role in ("classification", "separator"))
    ids = [(first, ours.special_tokens.classification), (last, ours.special_tokens.separator)]
    ours.backend.post_processor = TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} {last} $B {last}", special_tokens=ids
    )
    theirs = LoadedModel(model, ours, "released").encoder
    assert len(theirs.encode("the cat")) == 4
    assert "warning" not in capsys.readouterr().err
    refused = "released: found a pair of texts .* joins them in another way than"
    with pytest.raises(UserError, match=refused):
        theirs.encode("the cat", "the mat")
    for single, pair, warned in (
        ("$A", "$A $B", True),
        (f"{first} $A:1 {last}", f"{first} $A {last} $B:1 {last}:1", True),  # with the vector of the second text
        (f"{first} $A", f"{first} $A {last} $B:1 {last}:1", True),
        (f"{first} $A {last}", f"{first} $A {last} $B {last}", False),  # of one type
        (f"{first} $A {last}", f"{first} $B {last} $A:1 {last}:1", False),
    ):
        ours.backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ids)
        theirs = LoadedModel(model, ours, "released").encoder
        said = capsys.readouterr().err
        assert ("released: its tokenizer puts other special tokens around a text" in said) == warned
        with pytest.raises(UserError, match=refused):
            theirs.encode("the cat", "the mat")
    put_around_texts(ours.backend, ours.names)
    assert len(LoadedModel(model, ours, "tuned").encoder.encode("the cat", "the mat")) == 7
    ours.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for names, named, beside, typed in (
        (["input_ids", "token_type_ids"], None, {}, True),
        (["input_ids"], None, {"transformers_version": "4.57.1"}, False),
        (None, "BertTokenizer", {"tokenizer_class": "DistilBertTokenizer"}, True),
        (None, "TokenizersBackend", {"tokenizer_class": "BertTokenizer"}, False),
        (None, None, {"tokenizer_class": "DistilBertTokenizer"}, False),
        (None, None, {"tokenizer_class": "BertTokenizerFast"}, True),
        # As the version that saved it gives them, with which it was trained.
        (None, "AlbertTokenizerFast", {"transformers_version": "4.57.1"}, True),
        (None, "AlbertTokenizer", {"transformers_version": "5.0.0"}, False),
        (None, "PreTrainedTokenizerFast", {"transformers_version": "4.57.1"}, True),
        (None, "PreTrainedTokenizerFast", {}, False),
        (None, None, {"model_type": "albert", "transformers_version": "5.2"}, False),
        (None, "AlbertTokenizer", {}, True),  # before 4.1 none was written
    ):
        path.write_text(json.dumps(config | {"model_input_names": names, "tokenizer_class": named}))
        (tmp_path / "config.json").write_text(json.dumps(beside))
        own = Tokenizer.from_folder(tmp_path)
        assert not (own.gives_token_types(as_saved=False) and not typed)
        with nullcontext() if typed else pytest.raises(UserError, match="token types whose tokenizer gives none"):
            assert len(LoadedModel(model, own, "released").encoder.encode("the cat", "the mat")) == 7
        assert len(LoadedModel(model, own, "run", trained_here=True).encoder.encode("the cat", "the mat")) == 7


def test_positions_that_begin_after_another_padding_token_are_refused():
    """Transformers counts positions by what is no padding: a text with that token would have others there."""
    ours = tokenizer()
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    pad = ours.special_tokens.pad
    for family, found in (("roberta", pad), ("bert", pad + 1), ("roberta", pad + 1)):
        config = BertConfig(vocab_size=ours.vocab_size, family=family, pad_token_id=found, layer_norm_eps=1e-5, **shape)
        refused = pytest.raises(UserError, match=f"folder: found .*, id {pad}, .* expected id {pad + 1}")
        with refused if config.first_position not in (0, pad + 1) else nullcontext():
            LoadedModel(BertForPreTraining(config), ours, "folder")


def test_a_tokenizer_of_another_size_than_the_model_is_refused_or_warned_of(capsys):
    """Rows that were rounded up, or kept for tokens to come, are usual."""
    ours = tokenizer()
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    tokens = ours.vocab_size
    refused = pytest.raises(UserError, match="folder: found a tokenizer of .*, expected at most")
    for rows, told in ((tokens - 1, False), (tokens, False), (tokens + 128, False), (tokens + 129, True)):
        model = BertForPreTraining(BertConfig(vocab_size=rows, **shape))
        with refused if rows < tokens else nullcontext():
            LoadedModel(model, ours, "folder")
        said = capsys.readouterr().err
        assert (f"{tokens} tokens for {rows} rows of word embeddings: is it the model's own?" in said) == told


def test_labels_that_look_alike_are_warned_of(capsys):
    ours = tokenizer()
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    for labels, told in ((("a", "b"), False), (("a", "a "), True)):
        config = BertConfig(vocab_size=ours.vocab_size, **shape)
        LoadedModel(BertForSequenceClassification(config, HeadConfig(labels)), ours, "folder")
        assert ("folder: its labels 'a' and 'a ' look alike; they are two classes" in capsys.readouterr().err) == told
