"""The laws of the house as functions from sources to what breaks them; test_laws.py plants a violation of each."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("pipeline", "model", "launch")
Sources = dict[str, ast.Module]

# launch/: rooms of a level never import each other, whatever stands on one line; each sees the levels before it.
LEVELS = (
    ("system", "config", "parsing"),
    ("texts", "run"),
    ("engine",),
    ("checkpoint",),
    ("training", "pretrained"),
    ("pretrain", "finetune", "predict"),
    ("evaluate", "serve", "tools"),
    ("cli",),
)
# Imports of our own inside functions, beside the table of commands, and why each must wait.
LATE_IMPORTS = {
    ("cloze/__init__.py", "cloze.launch.predict"): "workers and other floors import the package without torch",
    ("launch/commands.py", "cloze.launch.parsing"): "worker processes import the command line too, and parse nothing",
    ("launch/predict/__init__.py", "cloze.launch.predict.predictor"): "the options of commands are read without torch",
    ("launch/predict/vectors.py", "cloze.model.sentences"): "the options of commands are read without torch",
    ("launch/pretrained/finding.py", "cloze.launch.checkpoint"): "a model's folder does not wait for DeepSpeed",
}
LONGEST_FUNCTION = 70  # lines; a screen is about 60
MOST_LEVELS = 7


def read_sources() -> Sources:
    """Every file of the three floors, and of the package that holds them."""
    paths = [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")] + list((ROOT / "cloze").glob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}


@functools.cache
def imports(tree: ast.AST) -> set[str]:
    """Full names of all modules that a file imports, wherever in it, also where a string names one of ours."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if named := re.fullmatch(r"(cloze(?:\.\w+)+)(?::\w+)?", node.value):
                names.add(named[1])
    return names


def file_of(name: str, sources: Sources) -> str | None:
    """The file of a module of ours; of a name in a module that module's."""
    parts = name.split(".")[1:] if name.startswith("cloze.") else []
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[:end])
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if candidate in sources:
                return candidate
    return None


def arrows(sources: Sources) -> dict[str, set[str]]:
    """Each file -> the files of ours that it imports. A package that is named for something in it counts if that
    something is its own."""
    found = {}
    for path, tree in sources.items():
        names = imports(tree)
        # `from package import module` names both; only the longest counts.
        names = {name for name in names if not any(other.startswith(name + ".") for other in names)}
        found[path] = {target for name in names if (target := file_of(name, sources))} - {path}
    return found


def offenders(sources: Sources, floor: str, modules: tuple[str, ...], but: tuple[str, ...] = ()) -> list[str]:
    """Files of a floor that import one of the modules, or something inside it."""
    return [
        f"{path} imports {name}"
        for path, tree in sources.items()
        for name in imports(tree)
        if path.startswith(floor)
        and path not in but
        and any(name == module or name.startswith(module + ".") for module in modules)
    ]


@functools.cache
def attributes(tree: ast.AST) -> set[str]:
    """Dotted expressions such as os.environ and torch.distributed."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@functools.cache
def calls_in(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def calls(sources: Sources) -> Iterator[tuple[str, ast.Call]]:
    return ((path, call) for path, tree in sources.items() for call in calls_in(tree))


def floors_by_their_own_name(sources: Sources) -> list[str]:
    """Under two names there would be two of each class."""
    relative = [path for path, tree in sources.items() if any(name.startswith(".") for name in imports(tree))]
    return offenders(sources, "", FLOORS) + [f"{path} imports relatively" for path in relative]


def model_knows_torch_only(sources: Sources) -> list[str]:
    allowed = set(sys.stdlib_module_names) | {"torch", "safetensors", "cloze"}
    return [
        f"{path} imports {name}"
        for path, tree in sources.items()
        if path.startswith("model/")
        for name in imports(tree)
        if name.split(".")[0] not in allowed
    ] + offenders(sources, "model/", ("cloze.pipeline", "cloze.launch"))


def pipeline_stands_alone(sources: Sources) -> list[str]:
    return offenders(sources, "pipeline/", ("cloze.model", "cloze.launch", "torch.distributed", "deepspeed", "rich"))


def torch_in_two_files_of_pipeline(sources: Sources) -> list[str]:
    return offenders(sources, "pipeline/", ("torch",), ("pipeline/loading/collate.py", "pipeline/loading/batches.py"))


def batches_in_one_place(sources: Sources) -> list[str]:
    """Only `concatenated` makes what a forward takes; `cloze plan` makes stand-ins without contents."""
    allowed = ("pipeline/loading/collate.py", "launch/tools/planning/trace.py")
    return [
        f"{path} makes a batch"
        for path, tree in sources.items()
        if path not in allowed
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and key.value == "sequence_offsets"
    ]


def special_tokens_around_texts_in_two_files(sources: Sources) -> list[str]:
    """Around arrays, and around a single text with the places of its tokens."""
    # Between documents that a sample of full sentences runs over stands one too.
    allowed = ("pipeline/samples/assembly.py", "pipeline/samples/samples.py", "launch/texts/encoding.py")
    return [
        f"{path} puts separators"
        for path, tree in sources.items()
        if path not in allowed
        for name in attributes(tree)
        if re.search(r"special\w*\.separator$", name)
    ]


def processes_in_one_file(sources: Sources) -> list[str]:
    one = "launch/system/distributed.py"
    return offenders(sources, "", ("torch.distributed",), (one,)) + [
        f"{path} uses {name}"
        for path, tree in sources.items()
        if path != one
        for name in attributes(tree)
        if name.startswith("torch.distributed")
    ]


def deepspeed_in_one_room(sources: Sources) -> list[str]:
    return [
        found
        for found in offenders(sources, "", ("deepspeed",), ("launch/checkpoint/deepspeed_files.py",))
        if not found.startswith("launch/engine/")
    ]


def environment_in_one_file(sources: Sources) -> list[str]:
    names = {"os.environ", "os.getenv", "os.putenv"}
    return [
        f"{path} uses {found}"
        for path, tree in sources.items()
        if path != "launch/system/environment.py"
        for found in (attributes(tree) | imports(tree)) & names
    ]


def network_for_launch_only(sources: Sources) -> list[str]:
    modules = (
        "socket",
        "urllib.request",
        "http",
        "requests",
        "httpx",
        "ftplib",
        "huggingface_hub",
        "obstore",
        "botocore",
        "boto3",
        "fsspec",
    )
    # A hub data set is streamed by `datasets`, in one reader, and stores are reached by one file's clients, because the
    # user named them.
    return offenders(sources, "model/", modules) + offenders(
        sources, "pipeline/", modules, ("pipeline/readers/hub.py", "pipeline/stores/clients.py")
    )


def pickles_as_weights_only(sources: Sources) -> list[str]:
    """In two files, and only as weights."""
    found = [
        f"{path} imports {name}"
        for path, tree in sources.items()
        for name in imports(tree) & {"pickle", "dill", "cloudpickle"}
    ]
    for path, call in calls(sources):
        if ast.unparse(call.func) not in ("torch.load", "pickle.load", "pickle.loads"):
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if path not in ("launch/checkpoint/deepspeed_files.py", "model/huggingface.py"):
            found.append(f"{path}:{call.lineno} loads a pickle")
        elif given.get("weights_only") != "True":
            found.append(f"{path}:{call.lineno} loads more than weights")
    return found


def no_shell_no_eval_no_unsafe_yaml(sources: Sources) -> list[str]:
    names = ("eval", "exec", "os.system", "os.popen", "yaml.load")
    return [
        f"{path}:{call.lineno}"
        for path, call in calls(sources)
        if ast.unparse(call.func) in names or any(keyword.arg == "shell" for keyword in call.keywords)
    ]


def no_pandas(sources: Sources) -> list[str]:
    """It is no dependency, and pyarrow's methods of such names want it, in some versions (25.0) for types alone."""
    return [
        f"{path}:{call.lineno}"
        for path, call in calls(sources)
        if "pandas" in ast.unparse(call.func).rpartition(".")[2]
    ]


def room_of(path: str) -> str:
    """launch/system/console.py -> system; launch/cli.py and its table, launch/commands.py -> cli."""
    room = path.split("/")[1].removesuffix(".py")
    return "cli" if room == "commands" else room


def order_of_rooms(sources: Sources) -> list[str]:
    level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
    found = []
    for path, targets in arrows(sources).items():
        if not path.startswith("launch/") or path == "launch/__init__.py":
            continue
        if room_of(path) not in level:
            found.append(f"{path}: the law knows no room {room_of(path)}")
            continue
        for target in targets:
            if target.startswith("launch/") and target != "launch/__init__.py" and room_of(target) != room_of(path):
                if level.get(room_of(target), len(LEVELS)) >= level[room_of(path)]:
                    found.append(f"{path} imports {target}, which is not below it")
    return found


def no_circles(sources: Sources) -> list[str]:
    """Files that import each other, directly or by way of others."""
    graph, found, done = arrows(sources), [], set()

    def visit(path: str, trail: tuple[str, ...]) -> None:
        if path in trail:
            found.append(" -> ".join((*trail[trail.index(path) :], path)))
        elif path not in done:
            for target in sorted(graph.get(path, ())):
                visit(target, (*trail, path))
            done.add(path)

    for path in sources:
        visit(path, ())
    return found


def few_levels(sources: Sources) -> list[str]:
    """The longest chain of rooms of launch/."""
    rooms: dict[str, set[str]] = {}
    for path, targets in arrows(sources).items():
        if path.startswith("launch/"):
            rooms.setdefault(room_of(path), set()).update(
                room_of(each) for each in targets if each.startswith("launch/") and room_of(each) != room_of(path)
            )

    def height(room: str, above: tuple[str, ...] = ()) -> int:
        below = [each for each in rooms.get(room, ()) if each not in above]
        return 1 + max((height(each, (*above, room)) for each in below), default=0)

    heights = {room: height(room) for room in rooms}
    return [f"{room} stands on level {number}" for room, number in heights.items() if number > MOST_LEVELS]


def imports_at_the_top(sources: Sources) -> list[str]:
    """Ours; those of extras may stand in functions, since they may be missing."""
    found = []
    for path, tree in sources.items():
        at_top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in at_top:
                module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
                full = {module} | {f"{module}.{alias.name}" for alias in node.names}
                if module.startswith("cloze") and not any((path, name) in LATE_IMPORTS for name in full):
                    found.append(f"{path}:{node.lineno} imports {module} late")
    return found


def functions_fit_a_screen(sources: Sources) -> list[str]:
    """The formatter gives each parameter of a long signature a line: lines are those after it, the docstring's too."""
    return [
        f"{path}:{node.lineno} {node.name} has {lines} lines"
        for path, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.body[0].lineno + 1) > LONGEST_FUNCTION
    ]


Law = Callable[[Sources], list[str]]
# Each law with a file and a source that break it.
LAWS: dict[Law, tuple[tuple[str, str], ...]] = {
    floors_by_their_own_name: (
        ("launch/run/planted.py", "from pipeline.errors import UserError"),
        ("launch/run/planted.py", "def f():\n    import model"),
        ("launch/run/planted.py", "from . import runs"),
    ),
    model_knows_torch_only: (
        ("model/planted.py", "import numpy"),
        ("model/planted.py", "from cloze.pipeline.errors import UserError"),
        ("model/planted.py", "from cloze import launch"),
    ),
    pipeline_stands_alone: (
        ("pipeline/planted.py", "from cloze.launch.run import runs"),
        ("pipeline/planted.py", "import cloze.model.bert"),
        ("pipeline/planted.py", "import importlib\nimportlib.import_module('cloze.launch.run.runs')"),
        ("pipeline/jobs/planted.py", "from torch import distributed"),
    ),
    torch_in_two_files_of_pipeline: (("pipeline/loading/planted.py", "def f():\n    import torch"),),
    batches_in_one_place: (("launch/texts/planted.py", "batch = {'input_ids': 1, 'sequence_offsets': 2}"),),
    special_tokens_around_texts_in_two_files: (
        ("launch/texts/planted.py", "ids = [special.classification, *a, special.separator]"),
        ("launch/finetune/planted.py", "last = tokenizer.special_tokens.separator"),
    ),
    processes_in_one_file: (
        ("launch/run/planted.py", "import torch.distributed as dist"),
        ("model/planted.py", "import torch\ntorch.distributed.barrier()"),
    ),
    deepspeed_in_one_room: (
        ("launch/training/planted.py", "from deepspeed.utils import logger"),
        ("launch/checkpoint/planted.py", "import deepspeed"),
    ),
    environment_in_one_file: (
        ("launch/system/planted.py", "import os\nos.environ['A'] = '1'"),
        ("launch/system/planted.py", "from os import environ"),
    ),
    network_for_launch_only: (
        ("pipeline/readers/planted.py", "import socket"),
        ("model/planted.py", "from http import client"),
        ("pipeline/stores/planted.py", "def f():\n    import obstore"),
    ),
    pickles_as_weights_only: (
        ("launch/run/planted.py", "import pickle"),
        ("launch/run/planted.py", "import torch\ntorch.load('a', weights_only=True)"),
        ("model/huggingface.py", "import torch\ntorch.load('a')"),
    ),
    no_shell_no_eval_no_unsafe_yaml: (
        ("launch/run/planted.py", "eval('1')"),
        ("launch/run/planted.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
        ("pipeline/planted.py", "import yaml\nyaml.load('a')"),
    ),
    order_of_rooms: (
        ("launch/system/planted.py", "from cloze.launch.run import runs"),
        ("launch/config/planted.py", "from cloze.launch.system import memory"),
        (
            "launch/predict/planted.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cloze.launch.finetune.kinds import Read",
        ),
        ("launch/serve/planted.py", "f = 'cloze.launch.tools.export:export'"),
        ("launch/attic/planted.py", "import os"),
    ),
    no_circles: (
        ("pipeline/errors.py", "def f():\n    from cloze.pipeline.storage import publish_text"),
        (
            "model/config.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cloze.model.bert import BertModel",
        ),
    ),
    few_levels: (
        ("launch/texts/planted.py", "from cloze.launch.run import runs\nfrom cloze.launch.pretrained import hub"),
    ),
    imports_at_the_top: (
        ("launch/run/planted.py", "def f():\n    from cloze.pipeline.errors import UserError"),
        ("launch/run/planted.py", "if True:\n    import cloze.pipeline.errors"),
    ),
    no_pandas: (("pipeline/planted.py", "import pyarrow\npyarrow.uint16().to_pandas_dtype()"),),
    functions_fit_a_screen: (("model/planted.py", "def f():\n" + "    pass\n" * (LONGEST_FUNCTION + 1)),),
}
