"""Settings that are each tested alone, as users combine them."""

import pytest
import torch
from safetensors.torch import load_file

from cloze.launch.cli import main
from cloze.launch.finetune.tasks import find_task
from tests.launch.finetune.running import config_of, finetune
from tests.launch.finetune.small import write_tsv

BF16 = ("--train.precision", "bf16", "--epochs", 1)


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_what_does_not_learn_is_in_the_result_at_every_stage(model, files, tmp_path, stage):
    """DeepSpeed's stage 1 leaves it out of the weights that it puts together, each of what its optimizer keeps."""
    results, _ = finetune(
        "sst2",
        model,
        *files,
        tmp_path / "run",
        *BF16,
        "--freeze",
        "below_1",
        "--zero.stage",
        stage,
        "--monitor.inspect_every_steps",
        5,
    )
    assert results["validation"]["accuracy"] > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run/model"))
    for name in ("embeddings.word_embeddings.weight", "encoder.layer.0.output.dense.weight"):
        kept = before[name] if stage == "0" else before[name].bfloat16().float()  # as it was while the rest learned
        assert torch.equal(after[f"bert.{name}"], kept)
    name = "encoder.layer.1.output.dense.weight"
    assert not torch.equal(after[f"bert.{name}"].bfloat16(), before[name].bfloat16())


def test_muon_beside_a_frozen_encoder_has_no_matrix_to_update(model, files, tmp_path):
    results, _ = finetune(
        "sst2", model, *files, tmp_path / "run", *BF16, "--freeze", "encoder", "--optimizer.name", "muon"
    )
    assert results["steps"] == 15


def test_one_row_has_no_correlation_and_the_run_ends_all_the_same(model, tmp_path):
    rows = [(f"w{number} w1", number / 10) for number in range(12)]
    train, one = (
        write_tsv(tmp_path / f"{name}.tsv", ("text", "label"), part)
        for name, part in (("train", rows), ("one", rows[:1]))
    )
    results, _ = finetune("regression", model, train, train, tmp_path / "run", *BF16, "--test", one)
    assert results["test/one"]["pearson"] is None and results["test/one"]["examples"] == 1
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_pairs_for_a_shape_with_one_segment_type_and_a_number_that_yaml_takes_for_a_word(model, tmp_path):
    shape = tmp_path / "shape.yaml"
    shape.write_text(
        "hidden_size: 32\nnum_hidden_layers: 2\nnum_attention_heads: 2\nintermediate_size: 64\n"
        "type_vocab_size: 1\nlayer_norm_eps: 1e-5\n"
    )
    rows = [("w1 w2", "w3 fine", "yes"), ("w4", "w5 dull w6", "no")] * 8
    train = write_tsv(tmp_path / "train.tsv", ("text_a", "text_b", "label"), rows)
    results, _ = finetune("pair-classification", shape, train, train, tmp_path / "run", *BF16, "--tokenizer", model)
    assert results["validation"]["examples"] == 16


def test_a_field_of_another_kind_is_refused(model, files, tmp_path, capsys):
    shape = tmp_path / "shape.yaml"
    shape.write_text("hidden_size: wide\n")
    status = main(
        [
            "finetune",
            "sst2",
            "--model",
            str(shape),
            "--tokenizer",
            str(model),
            "--train",
            str(files[0]),
            "--validation",
            str(files[1]),
            "--output",
            str(tmp_path / "run"),
        ]
    )
    error = capsys.readouterr().err.strip()
    assert status == 2 and f"model: {shape}: --hidden_size: found wide, expected a whole number" in error
    assert "\n" not in error


def test_layers_of_a_shape_are_not_drawn_twice(model, files, tmp_path, capsys):
    (tmp_path / "shape.yaml").write_text("hidden_size: 32\nnum_attention_heads: 2\n")
    status = main(
        [
            "finetune",
            "sst2",
            "--model",
            str(tmp_path / "shape.yaml"),
            "--tokenizer",
            str(model),
            "--train",
            str(files[0]),
            "--validation",
            str(files[1]),
            "--output",
            str(tmp_path / "run"),
            "--reinitialize_layers",
            "1",
        ]
    )
    error = capsys.readouterr().err.strip()
    assert status == 2 and "reinitialize_layers: found 1 with" in error and "\n" not in error


@pytest.mark.parametrize(
    ("task", "length", "step"), [("squad", None, 128), ("squad", 512, 128), ("squad", 64, 21), ("sst2", 64, 31)]
)
def test_windows_overlap_in_sequences_of_any_length(task, length, step):
    given = () if length is None else ("--max_length", str(length))
    assert config_of(*given).for_task(find_task(task), 512).window_step == step
    assert config_of(*given, "--window_step", "9").for_task(find_task(task), 512).window_step == 9
