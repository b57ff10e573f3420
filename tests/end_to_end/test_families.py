"""Each family of encoders through the whole chain by its commands: a folder of transformers with random weights is
prepared for, continued by two processes (of some families they are killed), exported (the moving average of its
weights, too), loaded by transformers and fine-tuned. Half of its samples have whole words masked, half spans.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from cloze.model.families import BY_TYPE
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import byte_tokenizer, save_as_eurobert
from tests.forked import ForkedRun
from tests.launching import finish, kill_at, pretrain_arguments, resume
from tests.model.model_batches import add_strange_fields
from tests.synthetic import NAMES
from tests.tables import assert_same_names

LINES = [f"the {noun} {verb} near the {place} ." for noun in ("cat", "dog", "king", "child") for verb in
         ("sat", "ran", "slept", "sang") for place in ("house", "river", "wall", "tree", "road")]  # fmt: skip
SENTENCE = "the cat {} near the tree ."
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
# model_type -> beginning of the names of its classes, its own fields, and the options of a run that say its shape.
FAMILIES = {
    "bert": ("Bert", {**SIZES, "max_position_embeddings": 32}, ()),
    **{
        family: (
            classes,
            {**SIZES, "type_vocab_size": 1, "max_position_embeddings": 33, "layer_norm_eps": 1e-5},
            ("--model.family", family, "--model.type_vocab_size", "1", "--model.layer_norm_eps", "1e-5"),
        )
        for family, classes in (("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
    },
    "distilbert": (
        "DistilBert",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 32},
        ("--model.family", "distilbert", "--model.type_vocab_size", "0", "--model.pooler_activation", "relu"),
    ),
    "albert": (
        "Albert",
        {**SIZES, "embedding_size": 16, "max_position_embeddings": 32},
        ("--model.num_layer_groups", "1", "--model.embedding_size", "16", "--model.hidden_act", "gelu_tanh"),
    ),
    "deberta-v2": (
        "DebertaV2",
        {**SIZES, "max_position_embeddings": 32, "type_vocab_size": 0, "layer_norm_eps": 1e-5}
        | {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8, "share_att_key": True}
        | {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "legacy": False}
        | {"conv_kernel_size": 3, "conv_act": "gelu"},
        ("--model.family", "deberta-v2", "--model.type_vocab_size", "0", "--model.layer_norm_eps", "1e-5")
        + ("--model.position_embedding", "none", "--model.relative_attention", "both")
        + ("--model.relative_buckets", "8", "--model.relative_distances", "32", "--model.relative_norm", "true")
        + ("--model.embedding_projection", "before_norm", "--model.pooler_activation", "gelu")
        + ("--model.mlm_head", "deberta", "--model.convolution_size", "3", "--model.convolution_act", "gelu"),
    ),
    "mpnet": (
        "MPNet",
        {**SIZES, "pad_token_id": 1, "max_position_embeddings": 34, "layer_norm_eps": 1e-5},
        ("--model.family", "mpnet", "--model.type_vocab_size", "0", "--model.relative_position_buckets", "32")
        + ("--model.layer_norm_eps", "1e-5"),
    ),
    "eurobert": (
        "EuroBert",
        {**SIZES, "max_position_embeddings": 32, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
        (),
    ),
    "nomic_bert": ("NomicBert", {**SIZES, "max_position_embeddings": 32}, ()),
    "gte": ("Gte", {**SIZES, "max_position_embeddings": 32, "layer_norm_eps": 1e-5}, ()),
    "modernbert": (
        "ModernBert",
        {**SIZES, "max_position_embeddings": 32, "cls_token_id": None, "sep_token_id": None}
        | {"bos_token_id": None, "eos_token_id": None, "local_attention": 8},
        (),
    ),
}
# The one with the strangest weights and the one with the strangest tokenizer; how a run goes on knows no families.
KILLED = ("deberta-v2", "eurobert")


def test_every_family_is_sent_through_the_chain():
    """Tests of the objective do it with ELECTRA, which has no masked LM alone and no classifier of sequences."""
    assert_same_names(BY_TYPE, {*FAMILIES, "electra"}, "FAMILIES in this file, the shape of a family's tiny model")


def kept(folder: Path, *dropped: str) -> dict[str, object]:
    """What a folder says of a model beside its training and its head."""
    values = json.loads((folder / "config.json").read_text())
    names = {"architectures", "tokenizer_fingerprint", "finetuning_task", *dropped}
    return {name: each for name, each in values.items() if name not in names and not name.startswith("cloze_")}


def write_strange_tokenizer(folder: Path, names: dict[str, str]) -> dict[str, bytes]:
    """Files as no library writes them, with two separators between the texts of a pair, as RoBERTa has them; returns
    them.
    """
    path, described = folder / "tokenizer.json", json.loads((folder / "tokenizer_config.json").read_text())
    backend = tokenizers.Tokenizer.from_file(str(path))
    first, last = names["classification"], names["separator"]
    backend.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (first, last)],
    )
    path.write_text(backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"of_another_tool": [1]}))
    (folder / "merges.txt").write_bytes(b"#version: 0.2\r\n")
    return {name: (folder / name).read_bytes() for name in (path.name, "tokenizer_config.json", "merges.txt")}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_through_the_chain_and_stays_itself(family, tmp_path):
    classes, fields, shape = FAMILIES[family]
    if family == "eurobert":
        tokenizer = save_as_eurobert(LINES * 2, tmp_path / "source")
    else:
        padding, *others = NAMES.values()
        padded_with = fields.get("pad_token_id", 0)
        tokenizer = byte_tokenizer(LINES * 2, (*others[:padded_with], padding, *others[padded_with:]))
        tokenizer.save(tmp_path / "source")
    torch.manual_seed(0)
    kind = getattr(transformers, f"{classes}ForMaskedLM")
    config = kind.config_class(
        **{"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.special_tokens.pad, **fields}
    )
    kind(config).save_pretrained(tmp_path / "source")
    files = write_strange_tokenizer(tmp_path / "source", tokenizer.names)
    add_strange_fields(tmp_path / "source", Tokenizer.from_folder(tmp_path / "source").fingerprint)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    run, out = tmp_path / "run", tmp_path / "out"
    words = ["prepare", "--input", str(tmp_path / "text.jsonl"), "--tokenizer", str(tmp_path / "source")]
    words += ["--samples.objective", "full_sentences", "--max_length", "32", "--split.validation", "0.1"]
    sources = {name: str(tmp_path / name) for name in ("whole_word", "span")}
    for name, shards in sources.items():
        assert main([*words, "--output", shards, "--masking.strategy", name]) == 0
    mixture = {"sources": [{"name": name, "path": path, "weight": 1} for name, path in sources.items()]}
    options = ("--init_from", str(tmp_path / "source"), *shape)
    options += ("--train.max_steps", "40", "--checkpoint.every_steps", "8", "--ema.decay", "0.5")
    command = pretrain_arguments(json.dumps(mixture), run, *options)
    if family in KILLED:
        kill_at(20, command, 2)
        resume(command, 2)
    else:
        finish(ForkedRun(command, 2))
    assert main(["export", str(run), "--output", str(tmp_path / "last")]) == 0
    assert main(["export", str(run), "--output", str(out), "--ema", "true"]) == 0

    for folder in (tmp_path / "last", out):
        assert kept(folder) == kept(tmp_path / "source")
        assert {name: (folder / name).read_bytes() for name in files} == files
    last, average = (
        transformers.AutoModel.from_pretrained(folder).get_input_embeddings() for folder in (tmp_path / "last", out)
    )
    assert 0 < (average.weight - last.weight).abs().max() < 0.01  # the rate is 3e-3
    loaded, report = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    for auto in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        assert type(auto.from_pretrained(out)).__name__.startswith(classes)
    reader = transformers.AutoTokenizer.from_pretrained(out)
    pipe = transformers.FillMaskPipeline(loaded, reader, top_k=5)
    sentence = SENTENCE.format(tokenizer.names["mask"])
    guesses = Predictor.from_folder(out).fill_mask(sentence, 5)[0]
    for guess, expected in zip(guesses, pipe(sentence), strict=True):
        assert guess.probability == pytest.approx(expected["score"], abs=1e-5)
    batch = reader(LINES[:3], return_tensors="pt", padding=True)
    hidden = transformers.AutoModel.from_pretrained(out)(**batch).last_hidden_state[:, 0]
    vectors = torch.tensor(Predictor.from_folder(out).embed(LINES[:3], pooling="cls"))
    torch.testing.assert_close(vectors, hidden.detach(), atol=1e-5, rtol=0)

    with open(tmp_path / "train.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [("text", "label"), *((line, "cat" if "cat" in line else "other") for line in LINES)]
        )
    words = ["finetune", "classification", "--model", str(out), "--output", str(tmp_path / "tuned")]
    words += ["--train", str(tmp_path / "train.csv"), "--validation", str(tmp_path / "train.csv")]
    assert main([*words, "--text_columns", "text", "--label_columns", "label", "--epochs", "1"]) == 0
    tuned = tmp_path / "tuned" / "model"
    assert json.loads((tuned / "config.json").read_text())["architectures"] == [f"{classes}ForSequenceClassification"]
    of_head = ("id2label", "label2id", "problem_type", "classifier_pooling")
    assert main(["export", str(tmp_path / "tuned"), "--output", str(tmp_path / "tuned-out")]) == 0
    for folder in (tuned, tmp_path / "tuned-out"):
        assert kept(folder, *of_head) == kept(tmp_path / "source", *of_head)
        assert {name: (folder / name).read_bytes() for name in files} == files
    theirs = transformers.pipeline("text-classification", model=str(tuned), device="cpu")
    found = Predictor.from_folder(tuned).classify(LINES[:4])
    for ours, other in zip(found, theirs(LINES[:4]), strict=True):
        assert ours[0].score == pytest.approx(other["score"], abs=1e-5)
