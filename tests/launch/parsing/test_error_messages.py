"""What is said of wrong words and files: plain words, none of the parser's library."""

import re

import pytest

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.parsing.fields import describe
from cloze.model.config import ModelError
from cloze.pipeline.errors import UserError
from tests.launch.parsing.test_help_pages import LIBRARY, config_of

GIVEN = {
    "pretrain": ["--data", "d", "--output", "o"],
    "prepare": ["--input", "i", "--output", "o"],
    "finetune": ["sst2", "--model", "m", "--train", "t", "--validation", "v", "--output", "o"],
    "predict classify": ["m", "a"],
    "export": ["r"],
    "serve": ["m"],
}


VALUES = (
    "",
    "null",
    "many",
    "-1",
    "1.5",
    "[1, a]",
    "{a: 1}",
    "{learning_rate: x}",
    "[",
    ": :",
    "'",
    "&a *a",
    "/",
    "!!python/object:x",
    "nowhere.yaml",
    "- a",
)


def refusals(name):
    """What is said of wrong values for one field of each kind, and of wrong words."""
    kinds = {}
    for field in describe(config_of(name)).values():
        kinds.setdefault(field.kind if not field.is_section else field.name, field)
    for field in kinds.values():
        flag = f"--{field.name}"
        attempts = [[flag], [f"{flag}.x", "1"], [f"{flag}+", "x"], *([f"{flag}={value}"] for value in VALUES)]
        for attempt in attempts:
            yield GIVEN[name] + attempt
    for words in (
        ["extra", "words"],
        ["-x"],
        ["--=3"],
        ["--print_config=zz"],
        ["--print_shtab=bash"],
        ["--config"],
        ["--nonsense", "3"],
    ):
        yield GIVEN[name] + words
    yield GIVEN[name][2:]
    yield []


@pytest.mark.parametrize("name", GIVEN)
def test_wrong_words_are_named_in_plain_words(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = []
    for words in refusals(name):
        try:
            parse(name, words)
        except UserError as error:
            assert not LIBRARY.search(str(error)), (words, str(error))
            assert "\n" not in str(error) and "its field does not take" not in str(error), words
            assert re.search("found|expected", str(error)), (words, str(error))
            said.append(str(error))
        except (ModelError, SystemExit):  # a shape that cannot be; --print_config
            pass
    assert len(said) > 30


def test_fields_may_be_given_as_yaml_itself():
    for text in ("seed: 7\ntrain:\n  max_steps: 3\n", "{seed: 7, train: {max_steps: 3}}"):
        config = parse("pretrain", [*GIVEN["pretrain"], "--config", text, "--train.log_every_steps", "2"])
        assert (config.seed, config.train.max_steps, config.train.log_every_steps) == (7, 3, 2)
    assert parse("pretrain", [*GIVEN["pretrain"], "--train", "{max_steps: 3}"]).train.max_steps == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("prepare --mixture [3]", "--mixture: found 3, expected a list of {input, weight, source}"),
        ("prepare --mixture [{input:\u00a03}]", "--mixture: found 3 for input, expected one or more texts"),
        ("prepare --mixture [{weigth:\u00a01}]", "--mixture: found weigth, which is no field of it, expected"),
        (
            "prepare --mixture [{source:\u00a0{encoding_errors:\u00a0x}}]",
            "--mixture: found x for source.encoding_errors, expected one of: ",
        ),
        ("pretrain --schedule.name liner", "found liner, expected one of: linear, cosine,"),
        ("pretrain --schedule.name liner", "did you mean linear?"),
        ("finetune --model m", "cloze finetune: expected --train, --validation, --output, TASK, found none"),
        ("predict tag", "cloze predict tag: expected MODEL, found none"),
        ("finetune --task sst2", "found --task, which is no option; did you mean TASK, which is typed without a flag?"),
        ("inspect --dtaa d", "found --dtaa, which is no option; did you mean DATA, which is typed without a flag?"),
        (
            "pretrain --trian.max_steps 3",
            "found --trian.max_steps, which is no option; did you mean --train.max_steps?",
        ),
        ("finetune sst2 mnli", "found mnli, expected a --field before it"),
        ("pretrain --train.max_steps 3 --train.max_steps x", "--train.max_steps: found x, expected a whole number"),
        ("pretrain --train.max_steps", "--train.max_steps: found no value, expected a whole number"),
        (
            "pretrain --output o --data.sources [{path:\u00a0null}]",
            "--data: found no path in a section of it, expected one; it takes",
        ),
        (
            f"pretrain --output o --data d --train.max_steps {10**30}",
            "train.max_steps: found 1000000000000000000000000000000, expected at most 9223372036854775807",
        ),
        (
            "pretrain --output o --data.sources [{path:\u00a0a}] "
            f"--data.phases [{{weights:\u00a0{{a:\u00a01}},until_tokens:\u00a0{10**30}}},"
            "{weights:\u00a0{a:\u00a01}}]",
            "data.phases: found an end at 1e+30, expected one at 9223372036854775807 or before",
        ),
        *(
            (f"{words} {10**9}", f"{words.split(' --')[-1]}: found 1000000000, expected")
            for words in (
                "vocab --input i --output o --vocab_size",
                "prepare --input i --output o --tokenizer t --samples.pair_sets",
                "pretrain --output o --data d --processes",
                "pretrain --output o --data d --train.global_batch_size",
                "finetune sst2 --output o --model m --train t --validation v --seeds",
                "serve m --port",
                "serve m --read_seconds 1e10 --port",
            )
        ),
        ("pretrain --output o --data d --monitor.heartbeat_seconds 1e300", "monitor.heartbeat_seconds: found 1e+300"),
        ("export r --step newest", "--step: found newest, expected a whole number or best or null"),
    ],
)
def test_wrong_words_are_answered_with_what_is_right(words, expected, capsys):
    assert main([word.replace("\u00a0", " ") for word in words.split(" ")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line and not LIBRARY.search(line), line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "a: [1\n",
            "at line 2, column 1 (did not find expected ',' or ']'), expected a YAML file of NAME: VALUE lines",
        ),
        ("train:\n\tmax_steps: 3\n", "found malformed YAML in c.yaml at line 2, column 1"),
        ("- 1\n- 2\n", "found a list in c.yaml"),
        ("hello\n", "found a single value in c.yaml"),
        ("", "found nothing in c.yaml"),
        (bytes(range(128, 256)), "found bytes in c.yaml that are no UTF-8"),
        ("1: 2\n", "found the name 1 in c.yaml"),
        ("train: {2: 3}\n", "found the name 2 in c.yaml"),
        ("seed: !!python/name:os.system\n", "found malformed YAML in c.yaml at line 1, column 7"),
        ("train: 3\n", "found 3 for train in c.yaml, expected a YAML file of its fields, or {name: value}"),
        ("model: [1]\n", "found '[1]' for model in c.yaml"),
        ("optimizer: null\n", "found null for optimizer"),
        ("train.max_steps: many\n", "--train.max_steps: found many, expected a whole number"),
        ("train: {max_steps: many}\n", "--train.max_steps: found many, expected a whole number"),
        ("model: nowhere.yaml\n", "--model: found nowhere.yaml, expected a YAML file of its fields, or {name: value}"),
        ("optimizer: {name: sgd}\n", "--optimizer.name: found sgd, expected one of: adamw, lamb, muon, stable_adamw"),
        ("train: {log_every: 3}\n", "train: found log_every, which is no field of it; did you mean"),
        ("nonsense: 1\n", "found nonsense, which is no field"),
        ("train.max_steps: 1\ntrain: {max_steps: 2}\n", "found train.max_steps twice in c.yaml, by its dotted name"),
        ("train.max_steps: 1\ntrain: {seed: 2}\n", "found train.max_steps beside its section in c.yaml"),
        ("train: {seed: 2}\ntrain.max_steps: 1\n", "found train.max_steps beside its section in c.yaml"),
        ("train: {learning_rate: [1]}\n", "--train.learning_rate: found '[1]', expected a number"),
    ],
)
def test_wrong_files_are_named_in_plain_words(content, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["pretrain", *GIVEN["pretrain"], "--config", "c.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line and not LIBRARY.search(line), line
    for word in ("/", "nowhere.yaml", "{a: [}"):
        assert main(["pretrain", *GIVEN["pretrain"], "--config", word]) == 2
        assert not LIBRARY.search(capsys.readouterr().err)
