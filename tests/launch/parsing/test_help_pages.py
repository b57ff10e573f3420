"""What `--help` says, and what is said of words that are wrong: plain words, none of the parser's library."""

import re
import shlex

import pytest

from cloze.launch.cli import main
from cloze.launch.commands import COMMANDS, explain, parse
from cloze.launch.config.tasks import TASKS
from cloze.launch.parsing import shipped
from cloze.launch.parsing.fields import describe, in_words
from cloze.model.config import ModelError
from cloze.pipeline.errors import UserError

# Words of jsonargparse, argparse, PyYAML and of Python's types.
LIBRARY = re.compile(
    r"Parser key|typing|Literal|Union|Optional\[|<class|Got value|Given value|Namespace|NestedArg|ubtypes"
    r"|Unable to|Problem|NoneType|argument |Action|jsonargparse|Expected|unicode string|invalid|Unexpected"
    r"|block mapping|partial\("
)


def config_of(name):
    module, config = COMMANDS[name].config.split(":")
    return getattr(__import__(module, fromlist=[config]), config)


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_what_matters(name):
    first, everything = explain(name), explain(name, "all")
    known = describe(config_of(name))
    for field in known.values():
        last = f"{field.name.upper()} "
        for page, holds in ((everything, True), (first, field.name in COMMANDS[name].main)):
            if holds and (name, field.name) != ("finetune", "train_file"):  # --train, for short
                assert f"  --{field.name}" in page or f"  {last}" in page, field.name
        assert field.sentence, f"{field.name} has no sentence under it"
        assert field.sentence.rstrip(".").split(";")[0][:40] in one_line(everything)
    assert len(first.splitlines()) <= 85 and not LIBRARY.search(everything)
    assert max(map(len, everything.splitlines())) <= 120
    assert "null:" not in first, "a field that is not given is not called null"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_takes(name):
    assert COMMANDS[name].examples
    for example in COMMANDS[name].examples:
        assert example in explain(name)
        words = shlex.split(example.partition(" > ")[0])
        begin = words.index("cloze") + 1
        assert " ".join(words[begin : begin + len(name.split())]) == name
        parse(name, words[begin + len(name.split()) :])


def test_help_of_a_section_a_field_and_a_slip(capsys):
    assert main(["pretrain", "--help", "optimizer"]) == 0
    shown = capsys.readouterr().out
    assert "--optimizer.weight_decay" in shown and "--train.max_steps" not in shown
    assert main(["pretrain", "--data", "d", "--help=train.learning_rate"]) == 0
    assert "Peak learning rate" in capsys.readouterr().out
    assert main(["pretrain", "--help", "learning_rat"]) == 2
    assert "did you mean learning_rate?" in capsys.readouterr().err
    assert main(["finetune", "--help", "train"]) == 0
    shown = capsys.readouterr().out
    assert "--train.max_steps" in shown and "\n  --train " not in f"\n{shown}", "that flag is for examples"
    assert main(["help"]) == main(["help", "serve"]) == main(["help", "predict"]) == 0
    assert "usage: cloze serve MODEL" in capsys.readouterr().out
    assert main(["prepare", "--mixture.help"]) == 0 and "Weighted sources" in capsys.readouterr().out
    assert main(["predict", "--help", "all"]) == 0 and "predict score" in capsys.readouterr().out


def test_help_names_every_task_and_every_shipped_configuration():
    shown = one_line(explain("finetune"))
    for task in TASKS:
        assert re.search(rf"[ :]{re.escape(task)}[,; .]", shown), task
    assert all(name in explain("pretrain") for kind in ("pretrain", "model") for name in shipped(kind))


def test_help_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, explain("doctor").split("examples:")[0].splitlines())) <= 60


def test_kinds_of_values_in_words():
    assert in_words(int | None) == "a whole number" and in_words(list[float]).startswith("a list of numbers")
    assert in_words(describe(config_of("pretrain"))["zero.stage"].kind) == "one of: 0, 1, 2, 3"


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
            assert "\n" not in str(error) and "fields don't take" not in str(error), words
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
            "prepare --mixture [{source:\u00a0{format:\u00a0x}}]",
            "--mixture: found x for source.format, expected one of: ",
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
        ("a: [1\n", "found malformed YAML in c.yaml at line 2, column 1, expected a YAML file of NAME: VALUE lines"),
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
