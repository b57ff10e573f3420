"""Shapes that transformers lacks, loaded by transformers where Cloze cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import cloze
from cloze.launch.cli import main
from cloze.launch.system.environment.launchers import child_variables
from cloze.model import tasks
from cloze.model.bert import BertForPreTraining, BertModel
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from cloze.model.problems import HeadConfig
from tests.launch.tiny_models import tokenizer

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
HEAD = HeadConfig(("bad", "fair", "good"), pooling="max", layers="weighted")
# (class, class of transformers, head, what makes the shape another than BERT's and ModernBERT's)
MODELS = {
    "pretraining": (
        BertForPreTraining,
        "AutoModelForMaskedLM",
        None,
        {
            "position_embedding": "rotary",
            "norm_position": "pre",
            "gated_feed_forward": True,
            "linear_bias": False,
            "normalization": "rms_norm",
            "vocab_padding_multiple": 64,
            "hidden_act": "silu",
            "shifted_predictions": True,
        },
    ),
    "sinusoids": (
        tasks.BertForMaskedLM,
        "AutoModelForMaskedLM",
        None,
        {"position_embedding": "scaled_sinusoidal", "tie_word_embeddings": False, "mlm_head": "linear"},
    ),
    "alibi": (BertModel, "AutoModel", None, {"position_embedding": "alibi", "type_vocab_size": 0, "pooler": True}),
    "encoder": (BertForPreTraining, "AutoModel", None, {"local_attention_window": 4, "norm_position": "pre"}),
    "classifier": (tasks.BertForSequenceClassification, "AutoModelForSequenceClassification", HEAD, {}),
    "tagger": (
        tasks.BertForTokenClassification,
        "AutoModelForTokenClassification",
        HeadConfig(("O", "B", "I")),
        {"position_embedding": "sinusoidal", "segment_padding_index": 0, "type_vocab_size": 3},
    ),
    "spans": (tasks.BertForQuestionAnswering, "AutoModelForQuestionAnswering", None, {"norm_position": "pre"}),
}
ELSEWHERE = """
import sys
sys.modules["cloze"] = None  # whoever imports it fails
import torch, transformers
from safetensors.torch import load_file, save_file
folder, found = sys.argv[1], {}
for case in sys.argv[2:]:
    name, auto = case.split(":")
    inputs = load_file(f"{folder}/{name}.inputs")
    model, told = getattr(transformers, auto).from_pretrained(f"{folder}/{name}-hf", trust_remote_code=True,
                                                              output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
    assert not model.training and type(model).__module__.startswith("transformers_modules")
    ids = transformers.AutoTokenizer.from_pretrained(f"{folder}/{name}-hf", trust_remote_code=True)("the cat sat")
    assert len(ids["input_ids"]) == 5, ids
    with torch.no_grad():
        for key, value in model(**inputs).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = value.contiguous()
    if name == "classifier":
        assert model.config.id2label == {0: "bad", 1: "fair", 2: "good"}, model.config.id2label
        assert model(**inputs, labels=torch.tensor([0, 2])).loss.requires_grad
    if name == "encoder":
        from sentence_transformers import SentenceTransformer
        vectors = SentenceTransformer(f"{folder}/{name}-hf", trust_remote_code=True, device="cpu").encode(
            ["the cat sat", "a good film , and a bad one"])
        found["encoder.vectors"] = torch.tensor(vectors)
    if name == "pretraining":
        assert model.masked_lm.decoder.weight is model.bert.embeddings.word.weight
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        assert model.bert.embeddings.word.weight.grad is not None
assert sys.modules["cloze"] is None
save_file(found, f"{folder}/found")
"""


def expected(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What our class gives, by the names of transformers; the vocabulary's own rows."""
    with torch.no_grad():
        output = model(**inputs)._asdict()
    if "pooled_output" in output:
        return {"last_hidden_state": output["last_hidden_state"]} | (
            {} if output["pooled_output"] is None else {"pooler_output": output["pooled_output"]}
        )
    if output.get("prediction_logits") is not None:
        return {"logits": output["prediction_logits"][..., : model.config.vocab_size]}
    return {name: output[name] for name in ("logits", "start_logits", "end_logits") if output.get(name) is not None}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folders, and what each model should give for its inputs."""
    folder, wanted = tmp_path_factory.mktemp("models"), {}
    ours = tokenizer()
    ours.save(folder / "tokenizer")
    for number, (name, (kind, auto, head, changes)) in enumerate(MODELS.items()):
        config = BertConfig(**{"vocab_size": ours.vocab_size, **SHAPE, **changes})
        model = kind(config, **({} if head is None else {"head": head})).eval()
        init_weights(model, number)
        model.save(folder / name, folder / "tokenizer")
        generator = torch.Generator().manual_seed(number)
        inputs = {
            "input_ids": torch.randint(5, ours.vocab_size, (2, 9), generator=generator),
            "attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3]),
        }
        if config.type_vocab_size:
            inputs["token_type_ids"] = torch.tensor([[0] * 4 + [1] * 5] * 2) + (config.type_vocab_size > 2)
        save_file(inputs, folder / f"{name}.inputs")
        given = model.bert if auto == "AutoModel" and hasattr(model, "bert") else model
        wanted |= {f"{name}.{key}": value for key, value in expected(given, inputs).items()}
        assert main(["export", str(folder / name)]) == 0
    embedded = cloze.load(folder / "encoder-hf").embed(["the cat sat", "a good film , and a bad one"])
    return folder, wanted | {"encoder.vectors": torch.as_tensor(embedded)}


def test_what_transformers_loads_without_cloze_is_equal_to_ours(exported):
    folder, wanted = exported
    cases = [f"{name}:{auto}" for name, (_, auto, _, _) in MODELS.items()]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder), *cases],
        cwd=folder,
        text=True,
        capture_output=True,
        env=child_variables(HF_MODULES_CACHE=str(folder / "modules"), HF_HUB_OFFLINE="1"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(folder / "found")
    assert wanted.keys() <= found.keys()
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3]).bool()
    for name, value in wanted.items():
        other = found[name]
        assert other.dtype == torch.float32 and other.shape == value.shape, name
        if value.shape[:2] == mask.shape:
            value, other = value[mask], other[mask]
        assert value.std() > 0.01 and (value - other).abs().max() < 1e-5, name


def test_cloze_reads_its_exports_as_before_and_copies_of_them_bring_the_code(exported, capsys):
    folder, _ = exported
    capsys.readouterr()
    assert main(["export", str(folder / "classifier-hf"), "--output", str(folder / "again")]) == 0
    told = capsys.readouterr()
    assert "trust_remote_code=True" in told.err
    names = {path.name for path in (folder / "again").iterdir()}
    assert {"modeling_cloze.py", "configuration_cloze.py", "cloze_bert.py"} <= names
    again = tasks.BertForSequenceClassification.from_folder(folder / "again")
    before = tasks.BertForSequenceClassification.from_folder(folder / "classifier")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), before.parameters(), strict=True))
    card = (folder / "again/README.md").read_text()
    assert 'AutoModelForSequenceClassification.from_pretrained("again", trust_remote_code=True)' in card
