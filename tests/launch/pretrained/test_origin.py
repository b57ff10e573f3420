"""What a run keeps of the model folder that it began with."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrained.origin import keep_origin, read_origin, tokenizer_for_export
from cloze.launch.run import runs
from cloze.launch.run.description import write_description
from cloze.model.config import ModelError
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.launch.tiny_models import tokenizer

FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "spm.model"}


@pytest.fixture
def released(tmp_path) -> Path:
    """A folder whose tokenizer puts two separators between texts, as RoBERTa's; its files are not laid out as ours."""
    folder, ours = tmp_path / "released", tokenizer()
    ours.save(folder)
    first, last = (ours.names[role] for role in ("classification", "separator"))
    ours.backend.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(first, ours.special_tokens.classification), (last, ours.special_tokens.separator)],
    )
    (folder / "tokenizer.json").write_text(ours.backend.to_str())
    (folder / "config.json").write_text('{"model_type": "roberta", "of_another_tool": 1}')
    (folder / "spm.model").write_bytes(b"\0pieces")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    return folder


def test_a_run_keeps_the_files_that_still_hold(released, tmp_path):
    same = Tokenizer.from_folder(released)
    keep_origin(released, tmp_path / "run/origin", same, pairs=False, segments=False)
    assert read_origin(tmp_path / "run") == {"model_type": "roberta", "of_another_tool": 1}
    kept = tokenizer_for_export(tmp_path / "run")
    assert {path.name for path in kept.iterdir()} == FILES
    assert all((kept / name).read_bytes() == (released / name).read_bytes() for name in FILES)


def describe(folder: Path, released: Path, begun: bool = True) -> None:
    """As the starts of a run do, the first of which has the folder that it begins with."""
    same, config = Tokenizer.from_folder(released), PretrainConfig(data="d", output=str(folder))
    keep = partial(keep_origin, released, tokenizer=same, pairs=False, segments=False)
    saves = {runs.ORIGIN: keep if begun else lambda folder: None}
    write_description(folder, config, {"tokenizer_fingerprint": same.fingerprint}, saves, {})


def test_a_folder_that_is_gone_is_missed_until_it_is_written_again(released, tmp_path):
    """The export would have another config.json, and another class of tokenizer."""
    run = tmp_path / "run"
    run.mkdir()
    describe(run, released)
    assert tokenizer_for_export(run) == run / "origin"
    for gone in (lambda: (run / "origin/sha256.json").unlink(), lambda: shutil.rmtree(run / "origin")):
        gone()
        for read in (read_origin, tokenizer_for_export, partial(describe, released=released, begun=False)):
            with pytest.raises(UserError, match="origin/sha256.json: found no such file, expected it as the run"):
                read(run)
    content = (released / "config.json").read_text()
    (released / "config.json").write_text(content.replace("1}", "2}"))
    with pytest.raises(UserError, match="origin/sha256.json: found no such file"):
        describe(run, released)  # another model lies there now
    assert not (run / "origin.tmp").exists()
    (released / "config.json").write_text(content)
    describe(run, released)
    assert tokenizer_for_export(run) == run / "origin"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_what_was_kept_goes_out_as_the_run_has_written_it(released, tmp_path, name):
    """Another class or side of padding, by which transformers would read other texts."""
    describe(tmp_path, released)
    assert tokenizer_for_export(tmp_path) == tmp_path / "origin" and read_origin(tmp_path)
    path = tmp_path / "origin" / name
    path.write_text((path.read_text() if path.exists() else "{}") + "\n")
    for read in (read_origin, tokenizer_for_export):
        with pytest.raises(UserError, match=f"origin/{name}: found another file, expected it as the run has written"):
            read(tmp_path)


def test_a_tokenizer_that_gives_no_token_types_is_not_kept_where_pairs_have_them(tmp_path):
    ours = tokenizer()
    ours.save(tmp_path / "released")
    (tmp_path / "released/config.json").write_text('{"model_type": "bert"}')
    for inputs, kept in ((["input_ids", "token_type_ids"], True), (["input_ids"], False)):
        path = tmp_path / "released/tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": inputs}))
        for pairs in (True, False):
            folder = tmp_path / f"{len(inputs)}-{pairs}"
            keep_origin(
                tmp_path / "released", folder, Tokenizer.from_folder(tmp_path / "released"), pairs=pairs, segments=True
            )
            assert (folder / "tokenizer.json").exists() == (kept or not pairs)


@pytest.mark.parametrize("case", ["pairs", "another tokenizer"])
def test_a_tokenizer_that_is_not_the_same_any_more_is_not_kept(case, released, tmp_path):
    own = Tokenizer.from_folder(released)
    if case == "another tokenizer":
        own.backend.add_tokens(["gallbladder"])
        own = Tokenizer(own.backend, own.names)
    keep_origin(released, tmp_path / "run/origin", own, pairs=case == "pairs", segments=False)
    assert {path.name for path in (tmp_path / "run/origin").iterdir()} == {"config.json"}
    own.save(tmp_path / "run/tokenizer")
    assert tokenizer_for_export(tmp_path / "run") == tmp_path / "run/tokenizer"


@pytest.mark.parametrize("field, value", [("do_lower_case", False), ("pad_token", "[UNK]")])
def test_a_run_whose_tokenizer_was_changed_is_refused(tmp_path, field, value):
    """The same words would have other ids, or another token would be padding, without a word."""
    folder, ours = tmp_path / "tokenizer", tokenizer()
    ours.save(folder)
    (tmp_path / "data.json").write_text(json.dumps({"tokenizer_fingerprint": ours.fingerprint}))
    described = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "BertTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"model_max_length": 7}))
    assert tokenizer_for_export(tmp_path) == folder, "what changes no id is free"
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {field: value}))
    with pytest.raises(UserError, match=f"{folder}: found .*, expected"):
        tokenizer_for_export(tmp_path)


@pytest.mark.parametrize("change", ["no end", "segments"])
def test_an_edited_post_processor_does_not_go_out(tmp_path, change):
    """By which transformers would give the model other texts than it has learned from."""
    folder, ours = tmp_path / "tokenizer", tokenizer()
    ours.save(folder)
    (tmp_path / "data.json").write_text(json.dumps({"tokenizer_fingerprint": ours.fingerprint}))
    assert tokenizer_for_export(tmp_path) == folder
    content = json.loads((folder / "tokenizer.json").read_text())
    single = content["post_processor"]["single"]
    if change == "no end":
        single.pop()
    else:
        content["post_processor"]["pair"][-1]["SpecialToken"]["type_id"] = 0
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="tokenizer.json: found a post_processor that puts other special tokens"):
        tokenizer_for_export(tmp_path)


def test_a_run_from_a_run_keeps_what_the_first_one_kept(released, tmp_path):
    """But nothing of one that began with random weights."""
    own = Tokenizer.from_folder(released)
    keep_origin(released, tmp_path / "first/origin", own, pairs=False, segments=False)
    keep_origin(tmp_path / "first", tmp_path / "second/origin", own, pairs=False, segments=False)
    assert {path.name for path in (tmp_path / "second/origin").iterdir()} == FILES
    (tmp_path / "random").mkdir()
    keep_origin(tmp_path / "random", tmp_path / "third/origin", own, pairs=False, segments=False)
    assert not (tmp_path / "third").exists() and read_origin(tmp_path / "third") is None


def test_a_vocab_txt_of_other_words_does_not_go_out_with_the_model(tmp_path):
    """Nothing here reads it beside a tokenizer.json, but old classes of transformers do."""
    folder, ours = tmp_path / "tokenizer", tokenizer()
    ours.save(folder)
    (tmp_path / "data.json").write_text(json.dumps({"tokenizer_fingerprint": ours.fingerprint}))
    words = (folder / "vocab.txt").read_text()
    (folder / "vocab.txt").write_text(words.replace("\ncat\n", "\ncot\n"))
    with pytest.raises(UserError, match="vocab.txt: found other tokens than tokenizer.json has"):
        tokenizer_for_export(tmp_path)
    (folder / "vocab.txt").unlink()
    assert tokenizer_for_export(tmp_path) == folder


def test_a_file_larger_than_any_tokenizers_is_not_copied(released, tmp_path):
    with open(released / "spm.model", "r+b") as file:
        file.truncate(2 << 30)
    with pytest.raises(ModelError, match="spm.model: found 2,147,483,648 bytes, expected at most"):
        keep_origin(released, tmp_path / "origin", Tokenizer.from_folder(released), pairs=False, segments=False)
