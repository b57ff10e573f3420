"""`cloze tokenize`: tokens as transformers gives them, from a tokenizer's folder alone."""

import shutil

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from tests.launch.errors import error_of
from tests.launch.predict.asking import lines


def test_tokens_as_transformers_gives_them(folders, capsys):
    from transformers import AutoTokenizer

    (line,) = lines(capsys, "tokenize", folders / "pretrained", "Walking [MASK] é", "--pair", "the sky")
    theirs = AutoTokenizer.from_pretrained(folders / "pretrained")
    assert line["tokens"][:3] == ["[CLS]", "walk", "##ing"] and line["tokens"][-1] == "[SEP]"
    assert "[MASK]" not in line["tokens"], "in a text it is text"
    (line,) = lines(capsys, "tokenize", folders / "pretrained", "Walking, é unknown", "--pair", "the sky")
    expected = theirs("Walking, é unknown", "the sky", return_offsets_mapping=True)
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert line[name] == expected[name]
    assert [tuple(pair) for pair in line["offsets"]] == expected["offset_mapping"]
    ours = Predictor.from_folder(folders / "pretrained").tokenize("Walking, é unknown", "the sky")
    assert (ours.tokens, ours.input_ids) == (line["tokens"], line["input_ids"])
    assert ours.offsets == expected["offset_mapping"]
    assert main(["tokenize", str(folders / "pretrained"), "a", "--format", "table"]) == 0
    assert "segment" in capsys.readouterr().out


def test_a_tokenizer_s_folder_is_enough_for_tokens(folders, capsys, tmp_path):
    """As `cloze vocab` leaves it, or only its vocabulary."""
    (expected,) = lines(capsys, "tokenize", folders / "pretrained", "the cat")
    for name in ("tokenizer.json", "vocab.txt"):
        (tmp_path / name).mkdir()
        if name == "vocab.txt":
            names = Predictor.from_folder(folders / "pretrained").tokenizer.tokens
            (tmp_path / name / name).write_text("".join(f"{token}\n" for token in names))
        else:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(folders / "pretrained" / file, tmp_path / name)
        assert lines(capsys, "tokenize", tmp_path / name, "the cat") == [expected]
    error = error_of(capsys, "tokenize", tmp_path, "the cat")
    assert f"found no tokenizer in the folder {tmp_path}, expected the folder of a tokenizer" in error
    assert "found no folder" in error_of(capsys, "tokenize", tmp_path / "none", "the cat")
    assert "expected a Cloze run" in error_of(capsys, "predict", "embed", tmp_path / "vocab.txt", "a"), "no model in it"
