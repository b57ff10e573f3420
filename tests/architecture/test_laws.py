"""The laws of the house (laws.py), held by reading the source, and what else holds for all of it."""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import parallel
from tests.architecture.laws import LATE_IMPORTS, LAWS, ROOT, imports, read_sources


def test_every_floor_was_read():
    assert {path.split("/")[0] for path in read_sources()} == {"pipeline", "model", "launch", "cloze"}
    assert len(read_sources()) > 100


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law):
    """It holds, and each planted violation breaks it."""
    assert not law(read_sources())
    for path, source in LAWS[law]:
        assert law(read_sources() | {path: ast.parse(source)}), f"{path}: {source!r} went unseen"


def test_every_late_import_is_one():
    late = {(path, name) for path, tree in read_sources().items() for name in imports(tree)}
    assert set(LATE_IMPORTS) <= late


def test_tests_and_scripts_name_the_package_too():
    paths = [path for folder in ("tests", "benchmarks", "docs", ".ci") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 50
    for path in paths:
        names = {name.split(".")[0] for name in imports(ast.parse(path.read_text(encoding="utf-8")))}
        assert not names & {"pipeline", "model", "launch"}, path


def test_what_scripts_import_is_there():
    """Late imports too: benchmarks have many, in processes of their own, that no test starts."""
    for path in [path for folder in ("benchmarks", "docs", ".ci") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("cloze", "tests"):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                    assert there, f"{path}: {node.module} has no {name}"


@pytest.mark.parametrize("floor", ["pipeline", "model", "launch"])
def test_a_floor_refuses_another_name(floor):
    """From the repository's folder both names would work."""
    result = subprocess.run([sys.executable, "-c", f"import {floor}"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    expected = f"ImportError: found an import of '{floor}', expected cloze.{floor}:"
    assert result.stderr.splitlines()[-1].startswith(expected)


def test_an_archive_without_links_says_so(tmp_path):
    package = tmp_path / "cloze"
    package.mkdir()
    for name in ("__init__.py", "version.py"):
        (package / name).write_bytes((ROOT / "cloze" / name).read_bytes())
    for name in ("pipeline", "model", "launch", "configs"):
        (package / name).write_text(f"../{name}")  # as git writes a link where there are none
    result = subprocess.run([sys.executable, "-c", "import cloze"], cwd=tmp_path, capture_output=True, text=True)
    assert "expected a link to pipeline/; clone with git where links are allowed" in result.stderr.splitlines()[-1]


def test_what_collate_emits_is_what_forward_takes():
    import numpy as np

    from cloze.model.bert import BertForPreTraining
    from cloze.pipeline.loading.collate import collate, concatenated
    from cloze.pipeline.records import Masks, Samples

    samples = Samples(
        input_ids=np.array([2, 7, 3, 9, 3], np.uint16),
        offsets=np.array([0, 5]),
        segment_b_start=np.array([3]),
        next_sentence_label=np.array([1]),
        document=np.array([5], np.uint64),
        source=np.zeros(1, np.uint16),
    )
    masks = Masks(positions=np.array([1]), ids=np.array([4], np.uint16), offsets=np.array([0, 1]))
    batch = collate(samples, masks)
    assert set(batch) <= set(inspect.signature(BertForPreTraining.forward).parameters)
    (sequences,) = concatenated(
        samples.input_ids.astype(np.int64), samples.offsets, samples.segment_b_start, np.array([1])
    )
    assert set(sequences) == set(batch) - {"masked_positions", "labels", "next_sentence_label"}


def config_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", config_files())
def test_every_config_parses(path, monkeypatch):
    import jsonargparse

    from cloze.launch.commands import parse
    from cloze.model.config import BertConfig

    monkeypatch.chdir(ROOT)
    kind = Path(path).parts[1]
    if kind == "model":
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(BertConfig, "model")
        assert isinstance(parser.instantiate(parser.parse_args(["--model", path])).model, BertConfig)
    elif kind == "pretrain":
        assert parse("pretrain", ["--config", path, "--data", "d", "--output", "o"]).train.max_steps
    elif kind == "finetune":
        files = ["--model", "m", "--train", "t", "--validation", "v", "--output", "o"]
        assert parse("finetune", ["sst2", "--config", path, *files]).epochs
    elif kind == "data":
        assert len(parse("pretrain", ["--data", path, "--output", "o"]).data.sources) > 1
    elif kind == "prepare":
        assert parse("prepare", ["--config", path, "--output", "o"]).max_length
    else:
        pytest.fail(f"{path}: no dataclass is known for configs/{kind}/")


def modules() -> list[str]:
    return sorted(
        f"cloze.{path}".removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in read_sources()
        if not path.startswith("cloze/")
    )


def test_every_module_imports_without_the_extras():
    """In one fresh process in which the extras cannot be found."""
    extras = (
        "datasets",
        "obstore",
        "botocore",
        "distributed",
        "dask",
        "transformers",
        "polars",
        "matplotlib",
        "sklearn",
        "scipy",
        "seqeval",
        "fastapi",
        "fastapi_offline",
        "uvicorn",
        "prometheus_client",
        "onnx",
        "onnxscript",
        "onnxruntime",
    )
    importable = [name for name in modules() if not name.endswith("__main__")]
    code = (
        "import sys, importlib\n"
        # None there is a module that cannot be imported, also to those who only ask for it (torch._dynamo: sklearn).
        f"sys.modules.update(dict.fromkeys({extras!r}))\n"
        f"for name in {importable!r}: importlib.import_module(name)\n"
    )
    variables = {**os.environ, "DS_ACCELERATOR": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=variables)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_command_line_answers_without_what_is_slow_to_import():
    """Neither `cloze --help` nor that of any command waits for torch or DeepSpeed, which take seconds to import, or
    (but for predict and tokenize, whose help is read from what they do) for NumPy and pyarrow, which take longer
    than all the rest of it.
    """
    from cloze.launch.commands import COMMANDS

    code = (
        "import sys\n"
        "from cloze.launch.cli import main\nfrom cloze.launch.commands import COMMANDS\n"
        "main(['--help'])\n"
        "reads_texts = {name for name in COMMANDS if name.split()[0] in ('predict', 'tokenize')}\n"
        "for name in sorted(COMMANDS, key=lambda name: name in reads_texts):\n"
        "    assert main([*name.split(), '--help']) == main([*name.split(), '--help', 'all']) == 0\n"
        "    slow = {'torch', 'deepspeed'} | (set() if name in reads_texts else {'numpy', 'pyarrow'})\n"
        "    assert not slow & set(sys.modules), (name, slow & set(sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("usage: cloze ") > 15
    for command in COMMANDS.values():
        assert f"{command.about[0].upper()}{command.about[1:]}." in " ".join(result.stdout.split())


def test_every_command_has_its_function_and_explains_every_field():
    from cloze.launch.commands import COMMANDS, explain
    from cloze.launch.parsing import build_parser
    from cloze.pipeline.references import load

    for name, command in COMMANDS.items():
        module, function = command.function.split(":")
        assert callable(getattr(importlib.import_module(module), function)), name
        everything = set(explain(name, "all").split())
        for action in build_parser(name, load(command.config), command.words, command.configs)._actions:
            shown = {f"--{action.dest}", action.dest.upper(), *(brief for brief, _ in COMMANDS[name].short)}
            hidden = action.dest == "print_shtab" or action.dest.endswith(".help")  # of the library, never reached
            assert hidden or shown & everything, action.dest


def test_tests_are_shared_by_folders_that_are_there():
    for folder in {*parallel.TOGETHER, *parallel.FIRST}:
        assert list((ROOT / folder).rglob("test_*.py")), folder
