"""The laws of the house, held by reading the source. Each names the one room in which a thing may happen."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDARD = set(sys.stdlib_module_names)
SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for floor in ("pipeline", "model", "launch") for path in sorted((ROOT / floor).rglob("*.py"))
}


def imports(tree: ast.AST) -> set[str]:
    """Full names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def offenders(floor: str, *modules: str, but: tuple[str, ...] = ()) -> list[str]:
    """Files of a floor that import one of the modules, or something inside it."""
    return [
        f"{path} imports {name}" for path, tree in SOURCES.items() for name in imports(tree)
        if path.startswith(floor) and path not in but
        and any(name == module or name.startswith(module + ".") for module in modules)
    ]


def attributes(tree: ast.AST) -> set[str]:
    """Dotted expressions such as os.environ and torch.distributed."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_floor_was_read():
    assert {path.split(os.sep)[0] for path in SOURCES} == {"pipeline", "model", "launch"}
    assert len(SOURCES) > 30


def test_model_imports_torch_safetensors_and_the_standard_library_only():
    allowed = STANDARD | {"torch", "safetensors", "model"}
    found = {f"{path}: {name}" for path, tree in SOURCES.items() if path.startswith("model")
             for name in imports(tree) if name.split(".")[0] not in allowed}
    assert not found


def test_pipeline_stands_alone():
    assert not offenders("pipeline", "model", "launch", "torch.distributed", "deepspeed", "rich")
    assert not offenders("pipeline", "torch", but=("pipeline/collate.py", "pipeline/batches.py"))


def test_one_room_for_processes_for_deepspeed_and_for_the_environment():
    assert not offenders("", "torch.distributed", but=("launch/distributed.py",))
    assert not offenders(
        "", "deepspeed",
        but=("launch/engine.py", "launch/optimizers/deepspeed_adam.py", "launch/checkpoint/deepspeed_files.py"),
    )
    for path, tree in SOURCES.items():
        used = attributes(tree)
        if path != "launch/environment.py":
            assert not used & {"os.environ", "os.getenv", "os.putenv"}, path
        if path != "launch/distributed.py":
            assert not any(name.startswith("torch.distributed") for name in used), path


def test_nothing_below_launch_reaches_the_network():
    modules = ("socket", "urllib.request", "http", "requests", "httpx", "ftplib", "huggingface_hub")
    assert not offenders("model", *modules)
    # A hub data set is streamed by `datasets`, in one reader, because the user named it as an input.
    assert not offenders("pipeline", *modules, but=("pipeline/readers/hub.py",))


def test_pickles_are_read_in_two_files_and_only_as_weights():
    for path, tree in SOURCES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        loads = [call for call in calls if ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads")]
        if loads:
            assert path in ("launch/checkpoint/deepspeed_files.py", "model/hub.py"), path
        for call in loads:
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert given.get("weights_only") == "True", f"{path}:{call.lineno}"
        assert not imports(tree) & {"pickle", "dill", "cloudpickle"}, path


def test_no_shell_no_eval_no_unsafe_yaml():
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "os.system", "os.popen", "yaml.load"), f"{path}:{node.lineno}"
            assert not any(k.arg == "shell" for k in node.keywords), f"{path}:{node.lineno}"


def test_what_collate_emits_is_what_forward_takes():
    import numpy as np

    from model.bert import BertForPreTraining
    from pipeline.collate import collate
    from pipeline.records import Masks, Samples

    samples = Samples(
        input_ids=np.array([2, 7, 3, 9, 3], np.uint16), offsets=np.array([0, 5]), segment_b_start=np.array([3]),
        next_sentence_label=np.array([1]), document=np.array([5], np.uint64),
        source=np.zeros(1, np.uint16),
    )
    masks = Masks(positions=np.array([1]), ids=np.array([4], np.uint16), offsets=np.array([0, 1]))
    assert set(collate(samples, masks)) <= set(inspect.signature(BertForPreTraining.forward).parameters)


def config_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", config_files())
def test_every_config_parses(path, monkeypatch):
    import jsonargparse

    from launch.cli import parse
    from model.config import BertConfig

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
    elif kind == "prepare":
        assert parse("prepare", ["--config", path, "--output", "o"]).max_length
    else:
        pytest.fail(f"{path}: no dataclass is known for configs/{kind}/")


def modules() -> list[str]:
    return sorted(path.removesuffix(".py").replace(os.sep, ".").removesuffix(".__init__") for path in SOURCES)


def test_every_module_imports_without_the_extras():
    """In one fresh process in which the extras cannot be found."""
    extras = ("datasets", "distributed", "dask", "transformers", "polars", "matplotlib", "sklearn",
              "scipy", "seqeval", "fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "onnx", "onnxscript",
              "onnxruntime")
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


def test_what_is_installed_has_the_files_beside_the_code(monkeypatch):
    """Type checkers look for py.typed in each package."""
    from setuptools import Distribution

    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["setup.cfg"])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    found = {f"{source}/{name}" for _, source, _, names in build.data_files for name in names}
    assert found == {"pipeline/py.typed", "model/py.typed", "launch/py.typed", "launch/serving/page.html"}


def test_the_command_line_answers_without_torch():
    """`cloze --help` must not wait for torch."""
    code = "import sys; from launch.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_every_command_has_its_function_and_explains_every_field():
    from launch.cli import COMMANDS, build_parser

    for name, command in COMMANDS.items():
        module, function = command.function.split(":")
        assert callable(getattr(importlib.import_module(module), function)), name
        for action in build_parser(name)._actions:
            assert action.help, f"cloze {name} --{action.dest} has no help"
