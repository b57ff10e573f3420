"""Where the values of a configuration come from."""

from cloze.launch.commands import COMMANDS
from cloze.launch.config import PretrainConfig
from cloze.launch.parsing import Given, parse
from cloze.launch.parsing.value_origins import chunks, names_in_file


def test_the_words_of_a_command_line_by_option():
    words = ["task", "--a", "--1", "--b=2", "--print_config", "--c+", "3", "--", "--d", "e"]
    assert list(chunks(words)) == [
        ("", ["task"]),
        ("a", ["--a", "--1"]),
        ("b", ["--b=2"]),
        ("print_config", ["--print_config"]),
        ("c", ["--c+", "3"]),
        ("", ["--", "--d", "e"]),
    ]


def test_names_of_a_file_and_of_yaml_itself(tmp_path):
    (tmp_path / "own.yaml").write_text("model: ../base.yaml\ntrain.max_steps: 5\n")
    assert names_in_file(str(tmp_path / "own.yaml")) == {"model", "train"}
    assert names_in_file("{seed: 5}") == {"seed"} and names_in_file("seed: 5\nmodel: {}\n") == {"seed", "model"}


def test_what_was_given_and_what_would_be_without_it(tmp_path):
    """Values that are those of the defaults too are given."""
    (tmp_path / "own.yaml").write_text("train: {max_steps: 200}\nseed: 42\n")
    found: list[Given] = []

    def complete(given: Given) -> dict[str, object]:
        found.append(given)
        return {"ema.decay": 0.5}

    words = ["--data", "d", "--output", "o", "--model", "base", "--model.hidden_size=768", "--train.max_steps", "7"]
    words += ["--config", str(tmp_path / "own.yaml")]
    config = parse("pretrain", PretrainConfig, words, configs=COMMANDS["pretrain"].configs, complete=complete)
    (given,) = found
    assert config.ema.decay == 0.5 and config.train.max_steps == given.value("train.max_steps") == 7
    assert given.untyped("train.max_steps") == 200
    assert given.has_section("model") and given.has_section("train") and not given.has_section("schedule")
    assert given.fields_of("model") == ["hidden_size"] and given.fields_of("zero") == []
