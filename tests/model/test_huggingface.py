"""Folders in and out: transformers must load ours, and we theirs, with every key accounted for."""

import dataclasses
import itertools
import json
import math
import os
import resource

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import BertWordPieceTokenizer

from cloze.model.bert import BertForPreTraining, BertModel
from cloze.model.config import BertConfig, ModelError
from cloze.model.config_files import config_from_huggingface
from cloze.model.huggingface import config_to_huggingface, copy_pretrained, load_head, load_pretrained, save_pretrained
from cloze.model.problems import HeadConfig
from cloze.model.tasks import ARCHITECTURES, BertForSequenceClassification
from cloze.model.weight_names import from_huggingface, to_huggingface
from tests.model.model_batches import TINY, TOLERANCE, batch, concatenate, pretraining_model, reference, scramble


def tokenizer_folder(folder, lowercase=True):
    """A small WordPiece tokenizer of some sentence pieces, padded to the vocabulary of TINY."""
    tokenizer = BertWordPieceTokenizer(lowercase=lowercase)
    words = [f"word{number}" for number in range(400)]
    tokenizer.train_from_iterator(words, vocab_size=TINY.vocab_size, min_frequency=1)
    tokenizer.save_model(str(folder))
    transformers.BertTokenizerFast.from_pretrained(str(folder), do_lower_case=lowercase).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_an_export_with_no_key_missing_and_equal_logits(tmp_path, dtype):
    model = pretraining_model().eval().to(dtype)
    source, export = tmp_path / "tokenizer", tmp_path / "export"
    source.mkdir()
    tokenizer_folder(source)
    save_pretrained(export, TINY, model.state_dict(), source)
    assert {"config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in export.iterdir()
    }
    assert not list(export.glob("*.tmp"))

    theirs, report = transformers.AutoModelForPreTraining.from_pretrained(export, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert theirs.dtype == dtype and type(theirs).__name__ == "BertForPreTraining"
    padded = {name: batch()[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    mask = padded["attention_mask"].bool()
    if dtype == torch.float32:
        torch.testing.assert_close(
            model(**padded).prediction_logits[mask], theirs(**padded).prediction_logits[mask], **TOLERANCE
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    assert (
        tokenizer("word1 word2")["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(source)("word1 word2")["input_ids"]
    )


def test_an_export_holds_no_padding_of_the_vocabulary_and_each_weight_once(tmp_path):
    model = pretraining_model()
    save_pretrained(tmp_path, TINY, model.state_dict())
    weights = load_file(tmp_path / "model.safetensors")
    assert len(weights["bert.embeddings.word_embeddings.weight"]) == TINY.vocab_size
    assert len(weights["cls.predictions.bias"]) == TINY.vocab_size
    assert "cls.predictions.decoder.weight" not in weights
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == TINY.vocab_size


@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_gives_the_model_back(tmp_path, tied):
    config = dataclasses.replace(TINY, tie_word_embeddings=tied, hidden_act="gelu_tanh", type_vocab_size=3)
    model = pretraining_model(config).eval()
    save_pretrained(tmp_path, config, model.state_dict())
    loaded_config, weights = load_pretrained(tmp_path)
    assert loaded_config == config
    again = BertForPreTraining(loaded_config).eval()
    again.load_state_dict(weights)
    flat = concatenate(batch())
    assert torch.equal(model(**flat).mlm_losses, again(**flat).mlm_losses)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining"])
def test_an_untied_decoder_has_its_bias_there_and_here(tmp_path, name):
    model = scramble(ARCHITECTURES[name](dataclasses.replace(TINY, tie_word_embeddings=False))).eval()
    model.save(tmp_path / "ours")
    theirs, report = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    inputs = {key: batch()[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
    torch.testing.assert_close(model(**inputs).prediction_logits, theirs(**inputs)[0], **TOLERANCE)
    with torch.no_grad():
        theirs.cls.predictions.bias += 1  # is not used there
        theirs.cls.predictions.decoder.bias += torch.arange(TINY.vocab_size)
    theirs.save_pretrained(tmp_path / "theirs")
    again = ARCHITECTURES[name].from_folder(tmp_path / "theirs")
    torch.testing.assert_close(again(**inputs).prediction_logits, theirs(**inputs)[0], atol=1e-4, rtol=0)


def test_a_model_without_segments_goes_to_transformers_with_one_of_zeros_and_comes_back_without(tmp_path):
    config = dataclasses.replace(TINY, type_vocab_size=0)
    model = pretraining_model(config).eval()
    model.save(tmp_path / "ours")
    theirs, report = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    inputs = {key: batch()[key] for key in ("input_ids", "attention_mask")}
    torch.testing.assert_close(model(**inputs).prediction_logits, theirs(**inputs)[0], **TOLERANCE)
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        again = BertForPreTraining.from_folder(tmp_path / folder)
        assert again.config == config
        assert torch.equal(again(**inputs).prediction_logits, model(**inputs).prediction_logits)
    weights = model.state_dict()
    assert set(from_huggingface(to_huggingface(weights, config), config)) == set(weights)
    with torch.no_grad():
        theirs.bert.embeddings.token_type_embeddings.weight += 0.1 * torch.arange(32)  # trained there
    theirs.save_pretrained(tmp_path / "trained")
    again = BertForPreTraining.from_folder(tmp_path / "trained")
    assert again.config.type_vocab_size == 1
    torch.testing.assert_close(again(**inputs).prediction_logits, theirs(**inputs)[0], **TOLERANCE)


def test_a_folder_of_transformers_loads_with_every_key(tmp_path):
    theirs = reference(pretraining_model()).eval()
    theirs.save_pretrained(tmp_path)
    config, weights = load_pretrained(tmp_path)
    model = BertForPreTraining(config).eval()
    model.load_state_dict(weights)
    padded = batch()
    torch.testing.assert_close(model(**padded).loss, theirs(**padded).loss, **TOLERANCE)


def test_an_old_checkpoint_with_gamma_beta_and_positions_loads(tmp_path):
    theirs = reference(pretraining_model())
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in theirs.state_dict().items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(48)[None]
    torch.save(old, tmp_path / "pytorch_model.bin")
    theirs.config.save_pretrained(tmp_path)
    _, weights = load_pretrained(tmp_path)
    assert set(weights) == set(BertForPreTraining(TINY).state_dict())


class Malicious:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    torch.save({"weights": Malicious()}, tmp_path / "pytorch_model.bin")
    reference(pretraining_model()).config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="pytorch_model.bin"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    "content, found",
    [
        (None, "config.json"),
        ("{", "config.json"),
        ('{"model_type": "gpt2"}', "gpt2"),
        ('{"model_type": "bert", "hidden_act": "mish"}', "mish"),
        ('{"model_type": "modernbert", "rope_scaling": {"type": "linear", "factor": 2.0}}', "linear"),
        ('{"model_type": "modernbert", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}', "yarn"),
        ('{"model_type": "bert"}', "model.safetensors"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(tmp_path, content, found):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=found) as caught:
        load_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_weights_are_refused(tmp_path):
    save_pretrained(tmp_path, TINY, pretraining_model().state_dict())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("described", [None, ["input_ids", "attention_mask"]])
def test_a_model_is_given_segments_if_it_has_them_whatever_its_tokenizer_says(tmp_path, described):
    config = dataclasses.replace(TINY, type_vocab_size=0, pooler=False)
    (tmp_path / "tokenizer").mkdir()
    tokenizer_folder(tmp_path / "tokenizer")
    if described:
        (tmp_path / "tokenizer/tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "BertTokenizer", "model_input_names": described})
        )
    one = dataclasses.replace(TINY, type_vocab_size=1)  # tells none apart, and has no vector for a second
    for each, expected in (
        (TINY, {"input_ids", "token_type_ids", "attention_mask"}),
        (one, {"input_ids", "attention_mask"}),
        (config, {"input_ids", "attention_mask"}),
    ):
        save_pretrained(tmp_path / "export", each, BertModel(each).state_dict(), tmp_path / "tokenizer")
        assert set(transformers.AutoTokenizer.from_pretrained(tmp_path / "export")("word1 word2")) == expected


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="tokenizer"):
        save_pretrained(tmp_path / "out", TINY, pretraining_model().state_dict(), tmp_path)


def test_defaults_are_bert_base():
    config = BertConfig(vocab_size=30522)
    with torch.device("meta"):
        model = BertForPreTraining(config)
    exported = to_huggingface(model.state_dict(), config)
    # 110,106,428: what transformers counts for bert-base-uncased with both heads, the tied matrix once.
    assert sum(tensor.numel() for tensor in exported.values()) == 110_106_428


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_decides_who_may_read_an_export(tmp_path, umask):
    (tmp_path / "tokenizer").mkdir()
    tokenizer_folder(tmp_path / "tokenizer")
    before = os.umask(umask)
    try:
        save_pretrained(tmp_path / "export", TINY, pretraining_model().state_dict(), tmp_path / "tokenizer")
        copy_pretrained(tmp_path / "export", tmp_path / "copy")
    finally:
        os.umask(before)
    for folder in ("export", "copy"):
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / folder).iterdir()}
        assert modes.keys() > {"model.safetensors", "config.json"} and set(modes.values()) == {oct(0o666 & ~umask)}


@pytest.mark.parametrize(("said", "expected"), [(1_000_000, 48), (None, 48), (10**30, 48), (16, 16)])
def test_transformers_cuts_texts_to_the_positions_of_an_export(tmp_path, said, expected):
    (tmp_path / "tokenizer").mkdir()
    path = tokenizer_folder(tmp_path / "tokenizer") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": said}))
    save_pretrained(tmp_path / "export", TINY, pretraining_model().state_dict(), tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert TINY.max_position_embeddings == 48 and tokenizer.model_max_length == expected
    model = transformers.AutoModel.from_pretrained(tmp_path / "export")
    inputs = tokenizer("word1 " * 200, truncation=True, return_tensors="pt")  # of 1,000,000 it cut nothing, and failed
    assert model(**inputs).last_hidden_state.shape[1] == expected


@pytest.mark.parametrize("own", [False, True])
def test_layers_that_are_only_claimed_cost_nothing(tmp_path, monkeypatch, own):
    config = dataclasses.replace(TINY, pooler=not own)
    save_pretrained(tmp_path, config, pretraining_model(config).state_dict())
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    assert (values["model_type"] == "cloze") == own
    path.write_text(json.dumps(values | {"num_hidden_layers": 4000}))
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_, **__: pytest.fail("a module is made"))
    monkeypatch.setattr("cloze.model.families.family.Family.names", lambda *_: pytest.fail("names of all layers"))
    with pytest.raises(ModelError, match=f"num_hidden_layers 4000, expected {TINY.num_hidden_layers}, the layers"):
        BertForPreTraining.from_folder(tmp_path)


@pytest.mark.parametrize(
    "field", ["hidden_size", "intermediate_size", "vocab_size", "type_vocab_size", "max_position_embeddings"]
)
def test_sizes_that_are_only_claimed_take_no_memory(tmp_path, field):
    """Of layers as wide as this one not even two fit into any machine."""
    model = pretraining_model()
    model.save(tmp_path)
    path = tmp_path / "config.json"
    for claimed in (1 << 20, 10**12, 10**400):
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: claimed}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ModelError) as caught:
            BertForPreTraining.from_folder(tmp_path)
        assert "\n" not in str(caught.value)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "in KiB"


@pytest.mark.parametrize("value", ["12", None, True, 3.5, [], {}, [1], float("nan")])
@pytest.mark.parametrize(
    "field",
    [
        "num_hidden_layers",
        "hidden_size",
        "hidden_dropout_prob",
        "hidden_act",
        "architectures",
        "max_position_embeddings",
        "tie_word_embeddings",
    ],
)
def test_values_of_another_kind_in_a_config_are_one_line(tmp_path, field, value):
    model = pretraining_model()
    model.save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    if field == "architectures" or (field, value) == ("tie_word_embeddings", True):
        assert BertForPreTraining.from_folder(tmp_path).config == model.config  # says no more than the weights do
        return
    if (field, value) == ("hidden_dropout_prob", 3.5):
        value = "0 <= p < 1"
    with pytest.raises(ModelError, match=field if field != "hidden_act" else "config.json|hidden_act") as caught:
        BertForPreTraining.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_new_head_is_said_in_full_whatever_the_model_began_as(family):
    """Labels of default names too, which an encoder's config.json leaves out; of the same class they stay left out."""
    theirs = transformers.AutoConfig.for_model(family).to_diff_dict() | {"model_type": family}
    config, head = config_from_huggingface(theirs), HeadConfig()
    named = {"id2label", "label2id", "problem_type"}
    for before in ("Model", "ForMaskedLM", "ForSequenceClassification"):
        origin = theirs | {"architectures": [{"bert": "Bert", "roberta": "Roberta"}[family] + before]}
        values = config_to_huggingface(config, "BertForSequenceClassification", torch.float32, head, origin)
        assert named & values.keys() == (set() if before == "ForSequenceClassification" else named)


def test_a_problem_that_is_not_known_is_refused(tmp_path):
    """It would be read as one of several classes, and its scores as probabilities."""
    BertForSequenceClassification(BertConfig.preset("tiny", vocab_size=40), HeadConfig(("a", "b"))).save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"problem_type": "ranking"}))
    with pytest.raises(ModelError, match=f"^{tmp_path}/config.json: found problem_type 'ranking', expected one"):
        load_head(tmp_path)


@pytest.mark.parametrize("content", ["[]", "3", "null", '"x"', "[" * 100_000])
def test_a_config_that_is_no_object_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match="config.json: ") as caught:
        load_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *itertools.product((torch.float32, torch.bfloat16, torch.float16), (math.nan, math.inf, -math.inf)),
        (torch.float64, 1e39),  # infinite in the 32 bits of a model
    ],
)
def test_weights_that_are_not_finite_are_refused(tmp_path, dtype, number):
    model = pretraining_model().to(dtype)
    with torch.no_grad():
        model.bert.encoder.layers[1].feed_forward.down.weight[3, 5] = number
    model.save(tmp_path)
    with pytest.raises(ModelError, match="bert.encoder.layer.1.output.dense.weight with numbers that are not finite"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("name,what", [("manifest.json", "prepared data"), ("checkpoints/step-00000001", "a run")])
def test_a_model_is_not_saved_among_something_else(tmp_path, name, what):
    model, folder = pretraining_model(), tmp_path / "runs"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).touch()
    with pytest.raises(ModelError, match=rf"runs: found {what} \({name.split('/')[0]}\), expected a new folder"):
        model.save(folder)
    assert [path.name for path in folder.iterdir()] == [name.split("/")[0]]
    model.save(tmp_path / "model")
    model.save(tmp_path / "model")  # over itself


def test_a_copy_of_a_folder_holds_the_model_and_nothing_else(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    pretraining_model().save(theirs, tokenizer_folder(theirs))
    torch.save(load_file(theirs / "model.safetensors"), theirs / "pytorch_model.bin")
    (theirs / "model.safetensors").unlink()
    (theirs / "optimizer.pt").write_bytes(b"a pickle")
    (theirs / "secrets").symlink_to("/etc")
    (theirs / ".git").mkdir()
    left = copy_pretrained(theirs, tmp_path / "copy")
    assert left == [".git", "optimizer.pt", "pytorch_model.bin", "secrets"]
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names and not names & set(left)
    (config, weights), (same, again) = load_pretrained(theirs), load_pretrained(tmp_path / "copy")
    assert config == same and weights.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


def test_links_of_the_hubs_cache_are_followed_and_no_others(tmp_path):
    blobs, snapshot = tmp_path / "models--a/blobs", tmp_path / "models--a/snapshots/0f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    pretraining_model().save(blobs, tokenizer_folder(blobs))
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    copy_pretrained(snapshot, tmp_path / "copy")
    assert not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())
    for name, target in (("vocab.txt", "/etc/passwd"), ("tokenizer_config.json", tmp_path / "copy/config.json")):
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(target)
        with pytest.raises(ModelError, match=f"{name}: found a link out of the model's folder, to "):
            copy_pretrained(snapshot, tmp_path / "another")
        (snapshot / name).unlink()
    for name in ("tokenizer.json", "special_tokens_map.json", "model.safetensors"):
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to("../../blobs/gone")
        for make in (lambda path: None, lambda path: (path.unlink(), os.mkfifo(path))):
            make(snapshot / name)
            with pytest.raises(ModelError, match=f"{name}: found no regular file, expected one"):
                copy_pretrained(snapshot, tmp_path / "another")
        (snapshot / name).unlink()
        if (blobs / name).exists():
            (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert not (tmp_path / "another").exists()


def test_a_head_with_shifted_predictions_is_kept_in_our_format_and_an_encoder_in_theirs(tmp_path):
    """A BertForMaskedLM of transformers would predict each token from its own vector."""
    config = dataclasses.replace(TINY, shifted_predictions=True)
    model = pretraining_model(config).eval()
    model.save(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["model_type"] == "cloze"
    again = BertForPreTraining.from_folder(tmp_path / "whole")
    inputs = {key: batch()[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
    assert again.config == config
    assert torch.equal(again(**inputs).prediction_logits, model(**inputs).prediction_logits)
    BertModel.from_folder(tmp_path / "whole").save(tmp_path / "encoder")
    theirs, report = transformers.AutoModel.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    expected = model.bert(**inputs).last_hidden_state
    torch.testing.assert_close(theirs(**inputs).last_hidden_state, expected, **TOLERANCE)
    assert not BertModel.from_folder(tmp_path / "encoder").config.shifted_predictions
