"""The words of a command line become a configuration: overrides, lists, names of shipped files."""

import re
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import jsonargparse.typing
import pytest
import yaml
from jsonargparse import _typehints as typehints

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.config import PretrainConfig
from cloze.pipeline.errors import UserError
from tests.launching import ROOT

BASE = PretrainConfig(data="d", output="o")


def test_overrides_win_over_the_file_whatever_the_order(tmp_path):
    (tmp_path / "c.yaml").write_text("train:\n  max_steps: 7\n  learning_rate: 0.5\n")
    config = parse(
        "pretrain", ["--train.max_steps", "9", "--config", str(tmp_path / "c.yaml"), "--data", "d", "--output", "o"]
    )
    assert (config.train.max_steps, config.train.learning_rate) == (9, 0.5)
    config = parse("pretrain", [f"--config={tmp_path / 'c.yaml'}", "--data", "d", "--output", "o"])
    assert config.train.max_steps == 7


def test_single_fields_win_over_the_file_of_their_section():
    for order in ((0, 1), (1, 0)):
        options = [["--model.hidden_size", "64"], ["--model", "configs/model/tiny.yaml"]]
        arguments = [word for i in order for word in options[i]]
        model = parse("pretrain", [*arguments, "--data", "d", "--output", "o"]).model
        assert (model.hidden_size, model.num_hidden_layers) == (64, 2)


@pytest.mark.parametrize("name", ["s.yaml", "./s.yaml", "s.of.yml", "s-1.yaml", "s.json", "small.YAML", "base.v2"])
def test_a_section_is_read_from_a_file_of_any_name(tmp_path, monkeypatch, name):
    """Also of one that a dotted name of a class could have, from the command line and from another file."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text('{"hidden_size": 96}')
    Path("o.yaml").write_text("weight_decay: 0.25\n")
    Path("c.yaml").write_text(f"model: {name}\noptimizer: o.yaml\n")
    (tmp_path / "elsewhere").mkdir()
    for words in (["--model", name, "--optimizer", "o.yaml"], ["--config", "c.yaml"], ["--config", "../c.yaml"]):
        monkeypatch.chdir(tmp_path / "elsewhere" if "../c.yaml" in words else tmp_path)
        config = parse("pretrain", ["--data", "d", "--output", "o", *words])
        assert (config.model.hidden_size, config.optimizer.weight_decay) == (96, 0.25)


@pytest.mark.parametrize("folder", ["mymodel", "x-shards"])
def test_a_value_is_no_section_because_it_ends_like_one(folder):
    assert parse("pretrain", ["--config", "tiny", "--data", folder, "--output", folder]).output == folder


def test_a_list_may_be_several_words_one_word_or_a_list():
    for words in (["a", "b"], ['["a", "b"]']):
        assert parse("vocab", ["--output", "o", "--input", *words, "--vocab_size", "99"]).input == ["a", "b"]
    assert parse("vocab", ["--input", "*.txt", "--output", "o"]).input == ["*.txt"]
    assert parse("vocab", ["--input=x", "--output", "o"]).input == ["x"]


def test_a_repeated_list_is_one_list(tmp_path):
    """Of a repeated option the library takes the last one alone: runs of a grid would be missing, in silence."""
    base = ["--output", "o", "--data", "d"]
    expected = ["train.learning_rate=1e-3,2e-3", "seed=1,2"]
    assert parse("sweep", [*base, "--grid", expected[0], "--grid", expected[1]]).grid == expected
    assert parse("sweep", [*base, f"--grid={expected[0]}", "--grid", f"[{expected[1]!r}]"]).grid == expected
    assert parse("sweep", [*base, "--grid", expected[0], f"--grid+={expected[1]}"]).grid == expected
    with pytest.raises(UserError, match="--grid: found .*expected one or more texts"):
        parse("sweep", [*base, "--grid", "[1, 2]", "--grid", "a=b"])
    pair = ["finetune", "--train", "t", "--validation", "v", "--model", "m", "--output", "o", "--labels", "0", "1"]
    assert parse(*pair[:1], [*pair[1:], "--", "classification"]).labels == ["0", "1"]
    (tmp_path / "file.yaml").write_text("grid: ['seed=1,2,3']")  # which flags replace, as any other field
    assert parse("sweep", [*base, "--config", str(tmp_path / "file.yaml"), "--grid", *expected]).grid == expected


def test_a_switch_needs_no_value():
    for words in (
        ["runs/x", "--follow"],
        ["--follow", "--interval_seconds", "2", "runs/x"],
        ["runs/x", "--follow", "true"],
    ):
        assert parse("status", words).follow is True
    assert parse("status", ["runs/x", "--follow", "false"]).follow is False
    assert (
        parse("pretrain", ["--output", "o", "--data", "d", "--train.deterministic", "--seed", "2"]).train.deterministic
        is True
    )
    with pytest.raises(UserError, match="--follow: found runs/x, expected true or false"):
        parse("status", ["--follow", "runs/x"])


@pytest.mark.parametrize("words", [["predict"], ["predict", "--help"]])
def test_the_first_of_two_words_lists_its_commands(capsys, words):
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "predict fill-mask" in printed and "pretrain" not in printed


def test_print_config_round_trips(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["pretrain", "--data", "d", "--output", "o", "--train.max_steps", "77", "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse("pretrain", ["--config", str(tmp_path / "printed.yaml")]).train.max_steps == 77


def test_the_command_line_without_a_command(capsys):
    assert main([]) == 0 and "pretrain" in capsys.readouterr().out
    assert main(["--version"]) == main(["--local_rank=1", "--version"]) == 0  # as `deepspeed` starts it
    assert main(["pretrian"]) == 2
    assert "did you mean pretrain?" in capsys.readouterr().err


def test_shipped_configurations_go_by_their_names(tmp_path, monkeypatch):
    """What exists in the folder goes first; what is neither is refused with the names that are known."""
    monkeypatch.chdir(tmp_path)
    by_name, by_path = (
        parse("pretrain", ["--config", name, "--data", "d", "--output", "o"])
        for name in ("tiny", str(ROOT / "configs" / "pretrain" / "tiny.yaml"))
    )
    assert by_name == by_path and by_name.model.hidden_size == 128
    assert parse("pretrain", ["--model=base", "--data", "d", "--output", "o"]).model.hidden_size == 768
    assert parse("prepare", ["--config", "books", "--output", "o"]).vocabulary.model == "wordpiece"
    for arguments, said in (
        (["--config", "tinny"], "--config: found no file 'tinny', expected a YAML file or one of"),
        (["--config", "tinny"], "did you mean tiny?"),
        (["--model", "bert-base"], "did you mean base?"),
        (["--config", "bert-base"], "did you mean bert-base-phase1 or bert-base-phase2?"),
        (["--model", "bse"], "--model: found no file 'bse', expected a YAML file or one of"),
        (["--config", "books"], "bert-base-phase1"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            parse("pretrain", [*arguments, "--data", "d", "--output", "o"])
    Path("tiny").write_text("train: {max_steps: 7}")
    assert parse("pretrain", ["--config", "tiny", "--data", "d", "--output", "o"]).train.max_steps == 7


def test_words_behind_two_dashes_keep_their_order():
    found = parse("predict fill-mask", ["m", "--top_k", "3", "a", "--", "-b", "--c"])
    assert found.model == "m" and found.text == ["a", "-b", "--c"] and found.top_k == 3
    found = parse("predict fill-mask", ["m", "--top_k", "3", "--", "-first", "second", "--third"])
    assert found.model == "m" and found.text == ["-first", "second", "--third"] and found.top_k == 3


def test_a_folder_hides_no_shipped_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "mini"):
        (tmp_path / name).mkdir()
    assert parse("pretrain", ["--config", "tiny", "--model", "mini", "--data", "d", "--output", "o"]).train.max_steps


def test_a_text_given_as_data_is_not_printed_whole(tmp_path):
    (tmp_path / "corpus.txt").write_text("A line of text.\n" * 1000)
    with pytest.raises(UserError, match="^data: found a text, 'A line of text") as error:
        parse("pretrain", ["--data", str(tmp_path / "corpus.txt"), "--output", "o"])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "words",
    [
        ["pretrain", "--data", "", "--output", "o"],
        ["pretrain", "--data", "d", "--output", "o", "--init_from", ""],
        ["vocab", "--input", "x", "--output", "o", "--extend", ""],
        ["status", ""],
        ["pretrain", "--data", "{sources: [{name: a, path: ''}]}", "--output", "o"],
        ["pretrain", "--data", "d", "--output", "o", "--evaluation.sets.news", ""],
        ["pretrain", "--data", "d", "--output", "o", "--evaluation.sets", "{news: ''}"],
        ["prepare", "--input", "a", "", "--tokenizer", "t", "--output", "o"],
        ["finetune", "sst2", "--model=", "--train", "t", "--validation", "v", "--output", "o"],
    ],
)
def test_an_empty_text_is_no_value(words):
    """It would be the current folder, or nothing, where an unset variable was meant."""
    with pytest.raises(
        UserError, match=r": found an empty text, such as an unset variable of the shell gives, expected"
    ):
        parse(words[0], words[1:])


@pytest.mark.parametrize("value", ["1:30", "1:30.5", "010", "# c", "190:20:30.15", "!!float 1:30"])
def test_a_number_on_the_command_line_is_read_as_it_looks(tmp_path, value):
    """As in a file, where YAML 1.1 has numbers to the base of 8 and 60, and comments."""
    for words in (["--masking.rate", value], ["--config", str(tmp_path / "c.yaml")]):
        (tmp_path / "c.yaml").write_text(f'masking: {{rate: "{value}"}}\n')
        with pytest.raises(UserError, match="masking.rate: found .*, expected a number"):
            parse("prepare", ["--input", "x", *words])
    (tmp_path / "c.yaml").write_text(f"masking:\n  rate: {value}\n")
    with pytest.raises(UserError, match="has the base 8 or 60|masking.rate: found null|not what its form or tag says"):
        parse("prepare", ["--input", "x", "--config", str(tmp_path / "c.yaml")])


@pytest.mark.parametrize("words", [["--masking.rate", "1" * 400], [f"--masking.rate={'1' * 400}"]])
def test_a_number_that_no_float_holds_is_refused(words):
    with pytest.raises(UserError, match="^cloze prepare: --masking.rate: found 1{9}.*, expected a number"):
        parse("prepare", ["--input", "x", *words])


def test_a_fine_tuning_is_repeated_by_its_own_configuration(tmp_path):
    first = parse("finetune", ["sst2", "--model", "m", "--train", "t", "--validation", "v", "--output", "o"])
    first = replace(first, evaluate_every_epochs=0.5).for_units(3200)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(first)))
    assert parse("finetune", ["--config", str(tmp_path / "config.yaml")]) == first


def test_the_time_to_read_sections_in_a_list_is_proportional_to_their_number(tmp_path):
    """The library copied the whole list for each of them: 100 sources of a mixture took 2.2 s, 200 took 6.1."""

    def seconds(number: int) -> float:
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump({"data": {"sources": [{"path": f"s{name}"} for name in range(number)]}}))
        start = time.process_time()
        config = parse("pretrain", ["--config", str(path), "--output", "o"])
        assert [source.path for source in config.sources][-1] == f"s{number - 1}"
        return time.process_time() - start

    seconds(1)  # whose imports and defaults are read once
    assert seconds(300) / seconds(75) < 7  # 4 if it is proportional, 12 before


def test_the_library_uses_what_is_replaced_in_it(tmp_path, monkeypatch):
    """Names that are not public, which a new version may leave unread."""
    (tmp_path / "sources.yaml").write_text("- input: [a]\n- input: [b]\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--mixture", str(tmp_path / "sources.yaml"), "--output", "o"]
    (tmp_path / "c.yaml").write_text("masking: m.yaml\n")
    (tmp_path / "m.yaml").write_text("rate: '0.25'\n")
    replaced = {
        "deepcopy": typehints,
        "basic_json_or_yaml_load": typehints,
        "import_object": jsonargparse._actions,
        "read_text": jsonargparse.typing.Path,
    }
    given = {name: [] for name in replaced}

    def recorded(name):
        function = getattr(replaced[name], name)

        def call(*arguments):
            given[name].append(arguments[0])
            return function(*arguments)

        return call

    for name, owner in replaced.items():
        monkeypatch.setattr(owner, name, recorded(name))
    config = parse("prepare", words)
    assert config.masking.rate == 0.25 and [source.input for source in config.mixture] == [["a"], ["b"]]
    assert any({"prev_val", "orig_val"} <= value.keys() for value in given["deepcopy"])
    assert "0.25" in given["basic_json_or_yaml_load"]
    assert "m.yaml" in given["import_object"]
    assert str(tmp_path / "sources.yaml") in [path.absolute for path in given["read_text"]]


@pytest.mark.parametrize(
    "file, expected",
    [
        ("seed: null", "--seed: found null, expected a whole number"),
        ("train: {max_steps: ~}", "--train.max_steps: found null, expected a whole number"),
        ("seed: 1\nmonitor.heartbeat_seconds:", "--monitor.heartbeat_seconds: found null, expected a number"),
        ("seed:", "--config: found 'seed:', expected fields with values"),
        ("data: {sources: [{path: s}], proportions: null}", "--data.proportions: found null, expected one of: tokens"),
        ("train: {batch_phases: [{global_batch_size: null, until_tokens: 5}]}", "train.batch_phases.*expected"),
        ("train: {sequence_length: null}", None),
    ],
)
def test_null_in_a_file_is_refused_by_fields_that_do_not_take_it(tmp_path, file, expected):
    """The library takes it for any: None went into the run, which ended with a traceback or went another way."""
    (tmp_path / "c.yaml").write_text(file)
    words = [
        "--config",
        str(tmp_path / "c.yaml"),
        "--output",
        "o",
        *([] if file.startswith("data") else ["--data", "d"]),
    ]
    with nullcontext() if expected is None else pytest.raises(UserError, match=expected):
        parse("pretrain", words)
