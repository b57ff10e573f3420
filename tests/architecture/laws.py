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
    ("training", "pretrained", "sweeps"),
    ("pretrain", "finetune", "predict"),
    ("evaluate", "serve", "tools"),
    ("cli",),
)
# Imports of our own inside functions, beside the table of commands, and why each must wait.
LATE_IMPORTS = {
    ("cloze/__main__.py", "cloze.launch.cli"): "no signal may come before it waits",
    ("cloze/__main__.py", "cloze.launch.system.environment.process"): "the same",
    ("cloze/__init__.py", "cloze.launch.predict"): "workers and other floors import the package without torch",
    ("launch/predict/__init__.py", "cloze.launch.predict.predictor"): "the options of commands are read without torch",
    ("launch/predict/vectors.py", "cloze.model.sentence_vectors"): "the options of commands are read without torch",
    (
        "launch/pretrain/objectives/__init__.py",
        "cloze.launch.pretrain.objectives.objective",
    ): "help reads the table alone",
    ("launch/pretrained/loading.py", "cloze.launch.checkpoint.weights"): "a model's folder does not wait for DeepSpeed",
    ("launch/evaluate/command.py", "cloze.launch.evaluate.glue"): "other suites do not wait for DeepSpeed",
}
# Files that import modules by names that are values; elsewhere the name is a literal.
IMPORTS_BY_VALUE = {
    "pipeline/references.py": "tables name functions and classes, whose modules are imported when they are used",
    "launch/system/plugins.py": "users name classes of their own",
    "launch/engine/optimizers/deepspeed_adam.py": "the library of a kernel is compiled on this machine",
}
# Files that import a module by a literal name, since nothing in it is used, or it may be missing.
IMPORTS_BY_LITERAL = {
    "launch/engine/repairs.py": "other versions of DeepSpeed lack the module",
    "pipeline/jobs/executors.py": "a worker imports what its tasks need, and uses nothing itself",
}
IMPORTERS = {
    "importlib.import_module",
    "importlib.__import__",
    "__import__",
    "importlib.util.spec_from_file_location",
    "importlib.util.module_from_spec",
    "pkgutil.resolve_name",
    "runpy.run_module",
    "runpy.run_path",
}
# Files whose output is a result of a command or a line for its user; all others hand lines to a Console or Progress.
PRINTERS = {
    "launch/cli.py": "help and version",
    "launch/commands.py": "a script of completion",
    "launch/system/streams.py": "the one line of an error, and warnings of a thread, on every rank",
    "launch/predict/command.py": "the vectors of a word, one JSON line each",
    "launch/predict/output.py": "results, one JSON line each or as a table",
    "launch/pretrain/command.py": "the configuration of DeepSpeed as JSON",
    "launch/system/console.py": "what every other file prints with",
    "launch/tools/data.py": "what was prepared, inspected and verified",
}
# Exceptions that say nothing of field, value and remedy, which a user would see as a traceback.
BARE_ERRORS = {
    "ArithmeticError",
    "BaseException",
    "Exception",
    "IndexError",
    "KeyError",
    "LookupError",
    "OSError",
    "RuntimeError",
    "SystemExit",
    "TypeError",
    "UnicodeError",
    "ValueError",
    "sys.exit",
    "exit",
    "quit",
}
# Files that raise some, and where they end.
RAISERS = {
    ("cloze/__main__.py", "sys.exit"): "the status of the process",
    ("model/huggingface.py", "OSError"): "the system's error, which safetensors has made another of",
    ("launch/engine/repairs.py", "RuntimeError"): "a bug: the optimizer has another state than was saved",
    ("launch/engine/summing.py", "RuntimeError"): "a bug: gradients were not summed",
    ("launch/run/trackers.py", "RuntimeError"): "caught in this file, where a tracker that fails is warned of",
    ("launch/texts/tables.py", "ValueError"): "as of json.loads, whose callers name file and line",
    ("pipeline/untrusted.py", "ValueError"): "as of json.loads, whose callers name file and line",
    ("pipeline/shards/shard_file.py", "ValueError"): "caught in shards/reader.py, where the damaged shard is named",
    ("pipeline/stores/clients.py", "RuntimeError"): "becomes a part of the error of the store's library",
}
LONGEST_FUNCTION = 70  # lines; a screen is about 60
MOST_LEVELS = 7


@functools.cache
def read_sources() -> Sources:
    """Every file of the three floors, and of the package that holds them; read once, by the first test that asks: each
    process of pytest-xdist imports the tests of all others too.
    """
    paths = [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")] + list((ROOT / "cloze").glob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def named_in_text(tree: ast.AST) -> set[str]:
    """Modules of ours that strings name, as the table of commands does: "cloze.launch.cli:main"."""
    pattern = rf"(cloze\.(?:{'|'.join(FLOORS)})(?:\.\w+)*)(?::\w*)?"  # of an f-string the part before its first value
    texts = {node.value for node in nodes(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {named[1] for text in texts if (named := re.fullmatch(pattern, text))}


@functools.cache
def imported(tree: ast.AST) -> set[str]:
    """What a file imports, wherever in it, by full names: `from a import b` is `a.b`, a module or a name in one."""
    names = named_in_text(tree)
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and full_name(node.func, aliases(tree)) in IMPORTERS:
            names |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    return names


@functools.cache
def imports(tree: ast.AST) -> set[str]:
    """What a file imports, and the modules that its names are imported from."""
    modules = {"." * node.level + (node.module or "") for node in nodes(tree) if isinstance(node, ast.ImportFrom)}
    return imported(tree) | modules


@functools.cache
def aliases(tree: ast.AST) -> dict[str, str]:
    """What the names of a file stand for: `import torch as t` -> t: torch, then `d = t.distributed` -> d: that."""
    found = {}
    assigned = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= {alias.asname: alias.name} if alias.asname else dict([[alias.name.split(".")[0]] * 2])
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned += [(each.id, node.value) for each in targets if isinstance(each, ast.Name)]
    builtin = {"__import__", "eval", "exec", "print"}
    for _ in range(2):  # of another such name too
        for name, value in assigned:
            full = full_name(value, found)
            if full and (full in builtin or full.split(".")[0] in {each.split(".")[0] for each in found.values()}):
                found.setdefault(name, full)
    return found


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """A dotted expression with its aliases resolved, `getattr(os, "system")` too; empty for any other expression."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id).removeprefix("builtins.")
    if isinstance(node, ast.Attribute):
        inner = full_name(node.value, names)
        return f"{inner}.{node.attr}".removeprefix("builtins.") if inner else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return f"{full_name(node.args[0], names)}.{node.args[1].value}".removeprefix("builtins.")
    return ""


def file_of(name: str, sources: Sources) -> str | None:
    """The file of a module of ours; of a name in a module that module's; of one in the package itself its root."""
    parts = name.split(".")
    if parts[0] != "cloze":
        return None
    for end in range(len(parts), 1, -1):
        path = "/".join(parts[1:end])
        for candidate in (f"{path}.py", f"{path}/__init__.py", f"cloze/{path}.py"):
            if candidate in sources:
                return candidate
    return "cloze/__init__.py"


def arrows(sources: Sources, known: Sources | None = None) -> dict[str, set[str]]:
    """Each file -> the files of ours that it imports. A package counts if something of its own is named.

    Args:
        known: all files of ours, if `sources` are a part of them.
    """
    return {
        path: {target for name in imported(tree) if (target := file_of(name, known or sources))} - {path}
        for path, tree in sources.items()
    }


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
    """Full names of all that a file uses, such as os.environ and torch.distributed."""
    names = aliases(tree)
    return {full_name(node, names) for node in nodes(tree) if isinstance(node, ast.Attribute | ast.Name | ast.Call)}


@functools.cache
def calls_in(tree: ast.AST) -> list[tuple[ast.Call, str]]:
    names = aliases(tree)
    return [(node, full_name(node.func, names)) for node in nodes(tree) if isinstance(node, ast.Call)]


def calls(sources: Sources) -> Iterator[tuple[str, ast.Call, str]]:
    """Each call with its file, and the full name of what is called."""
    return ((path, call, name) for path, tree in sources.items() for call, name in calls_in(tree))


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
        for node in nodes(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and key.value == "sequence_offsets"
    ]


def special_tokens_around_texts_in_two_files(sources: Sources) -> list[str]:
    """Around arrays, and around a single text with the places of its tokens."""
    # Between documents that a sample of full sentences runs over stands one too.
    allowed = ("pipeline/samples/assembly.py", "pipeline/samples/building.py", "launch/texts/encoding.py")
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
        if (name + ".").startswith("torch.distributed.")
    ]


def deepspeed_in_one_room(sources: Sources) -> list[str]:
    return [
        found
        for found in offenders(sources, "", ("deepspeed",), ("launch/checkpoint/deepspeed_files.py",))
        if not found.startswith("launch/engine/")
    ]


def environment_in_one_folder(sources: Sources) -> list[str]:
    names = {"os.environ", "os.getenv", "os.putenv"}
    return [
        f"{path} uses {found}"
        for path, tree in sources.items()
        if not path.startswith("launch/system/environment/")
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
    found = offenders(sources, "", ("pickle", "dill", "cloudpickle"))
    for path, call, name in calls(sources):
        if name not in ("torch.load", "pickle.load", "pickle.loads"):
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if path not in ("launch/checkpoint/deepspeed_files.py", "model/weight_files.py"):
            found.append(f"{path}:{call.lineno} loads a pickle")
        elif given.get("weights_only") != "True":
            found.append(f"{path}:{call.lineno} loads more than weights")
    return found


def no_shell_no_eval_no_unsafe_yaml(sources: Sources) -> list[str]:
    """`yaml.safe_dump` leaves texts such as 1e-3 without quotes (`dump_yaml` in pipeline/untrusted.py)."""
    names = ("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.safe_dump")
    return [
        f"{path}:{call.lineno}"
        for path, call, name in calls(sources)
        if name in names or any(keyword.arg == "shell" for keyword in call.keywords)
    ]


def no_pandas(sources: Sources) -> list[str]:
    """It is no dependency, and pyarrow's methods of such names want it, in some versions (25.0) for types alone."""
    return [
        f"{path}:{call.lineno}"
        for path, call, _ in calls(sources)
        if "pandas" in ast.unparse(call.func).rpartition(".")[2]
    ]


def imports_by_name_in_named_files(sources: Sources) -> list[str]:
    """`import_module` and its like take a literal, which the other laws read, but in two files."""
    named = IMPORTS_BY_VALUE.keys() | IMPORTS_BY_LITERAL.keys()
    found = [
        f"{path} uses {name}"
        for path, tree in sources.items()
        if path not in named
        for name in attributes(tree) & IMPORTERS
    ]
    return found + [
        f"{path}:{call.lineno} imports what is no literal"
        for path, call, name in calls(sources)
        if name in IMPORTERS and path in IMPORTS_BY_LITERAL
        if not (len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and not call.keywords)
    ]


def names_of_modules_are_whole(sources: Sources) -> list[str]:
    """A module's name is written in one piece, so that the laws of imports see it: no part of it is a value."""
    found = []
    for path, tree in sources.items():
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"cloze\.(\w+\.)*", node.value):
                    found.append(f"{path}:{node.lineno} begins a module's name")
            elif isinstance(node, ast.JoinedStr) and len(node.values) > 1:
                first = node.values[0]
                start = first.value if isinstance(first, ast.Constant) else ""
                if re.fullmatch(r"cloze\.[\w.]*", start):
                    found.append(f"{path}:{node.lineno} names a module by a value")
                rest = "".join(each.value for each in node.values[1:] if isinstance(each, ast.Constant))
                if not start and re.match(rf"\.({'|'.join(FLOORS)})\b", rest):
                    found.append(f"{path}:{node.lineno} names the package by a value")
    return found


def draws_are_seeded(sources: Sources) -> list[str]:
    """Draws come from generators with a key of their own, never from the state of the process."""
    keyed = {
        "random.Random",
        "numpy.random.Generator",
        "numpy.random.PCG64",
        "numpy.random.SFC64",
        "numpy.random.SeedSequence",
        "numpy.random.default_rng",
    }
    found = []
    for path, tree in sources.items():
        modules = {each for each in ("random", "numpy") if each in {name.split(".")[0] for name in imports(tree)}}
        prefixes = tuple({"random": "random.", "numpy": "numpy.random."}[each] for each in modules)
        used = {name for name in attributes(tree) if prefixes and name.startswith(prefixes)}
        found += [f"{path} uses {name}" for name in used if not any((name + ".").startswith(e + ".") for e in keyed)]
        found += [
            f"{path}:{call.lineno} gives {name} no seed"
            for call, name in calls_in(tree)
            if name in keyed and (not call.args or ast.unparse(call.args[0]) == "None")
        ]
    return found


def errors_are_for_users(sources: Sources) -> list[str]:
    """A user's mistake is a UserError (ModelError in model/), never a line that is printed or a bare exception."""
    found = [
        f"{path}:{call.lineno} prints"
        for path, call, name in calls(sources)
        if name in ("print", "sys.stdout.write", "sys.stderr.write") and path not in PRINTERS
    ]
    for path, tree in sources.items():
        names = aliases(tree)
        raised = [node.exc for node in nodes(tree) if isinstance(node, ast.Raise) and node.exc]
        raised = [each.func if isinstance(each, ast.Call) else each for each in raised]
        exits = [call.func for call, _ in calls_in(tree)]
        for node in raised + exits:
            name = full_name(node, names)
            if name in BARE_ERRORS and (node in raised or name in ("sys.exit", "exit", "quit")):
                if (path, name) not in RAISERS:
                    found.append(f"{path}:{node.lineno} raises {name}")
    return found


def fields_have_sentences(sources: Sources) -> list[str]:
    """What `--help` says of a field stands under it."""
    found = []
    for path, tree in sources.items():
        if not re.fullmatch(r"launch/config/\w+\.py|(\w+/)+config\.py", path):
            continue
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                    if not isinstance(field, ast.AnnAssign) or ast.unparse(field.annotation).startswith("ClassVar"):
                        continue
                    said = after.value if isinstance(after, ast.Expr) else None
                    if not (isinstance(said, ast.Constant) and str(said.value).strip()):
                        found.append(f"{path}:{field.lineno} {node.name}.{ast.unparse(field.target)} has no sentence")
    return found


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
        for node in nodes(tree):
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
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.body[0].lineno + 1) > LONGEST_FUNCTION
    ]


def classes_have_names_of_their_own(sources: Sources) -> list[str]:
    """Who looks for a class by its name finds one. A name that begins with an underscore is its file's own."""
    found: dict[str, str] = {}
    return [
        f"{path}:{node.lineno} {node.name} is a class of {found[node.name]} too"
        for path, tree in sources.items()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and found.setdefault(node.name, path) != path
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
        ("model/planted.py", "import importlib\nimportlib.import_module('yaml')"),
        ("model/planted.py", "from importlib import import_module as get\nget('cloze.pipeline.errors')"),
        ("model/planted.py", "__import__('numpy')"),
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
        ("model/planted.py", "import torch as t\nt.distributed.barrier()"),
        ("model/planted.py", "import torch\nt = torch\nd = t.distributed"),
        ("model/planted.py", "import torch\ngetattr(torch, 'distributed').barrier()"),
    ),
    deepspeed_in_one_room: (
        ("launch/training/planted.py", "from deepspeed.utils import logger"),
        ("launch/checkpoint/planted.py", "import deepspeed"),
    ),
    environment_in_one_folder: (
        ("launch/system/planted.py", "import os\nos.environ['A'] = '1'"),
        ("launch/system/planted.py", "from os import environ"),
        ("launch/system/planted.py", "import os as system\nsystem.environ['A'] = '1'"),
    ),
    network_for_launch_only: (
        ("pipeline/readers/planted.py", "import socket"),
        ("model/planted.py", "from http import client"),
        ("pipeline/stores/planted.py", "def f():\n    import obstore"),
    ),
    pickles_as_weights_only: (
        ("launch/run/planted.py", "import pickle"),
        ("launch/run/planted.py", "import torch\ntorch.load('a', weights_only=True)"),
        ("launch/run/planted.py", "from pickle import loads"),
        ("launch/run/planted.py", "from torch import load\nload('a', weights_only=False)"),
        ("model/weight_files.py", "import torch\ntorch.load('a')"),
        ("model/weight_files.py", "from torch import load\nload('a', weights_only=False)"),
        ("model/weight_files.py", "import torch\nread = torch.load\nread('a', weights_only=False)"),
    ),
    no_shell_no_eval_no_unsafe_yaml: (
        ("launch/run/planted.py", "eval('1')"),
        ("launch/run/planted.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
        ("pipeline/planted.py", "import yaml\nyaml.load('a')"),
        ("pipeline/planted.py", "from yaml import load as read\nread('a')"),
        ("launch/run/planted.py", "import yaml\nyaml.safe_dump({'a': '1e-3'})"),
        ("launch/run/planted.py", "import os as system\nsystem.system('ls')"),
        ("launch/run/planted.py", "from os import system\nsystem('ls')"),
        ("launch/run/planted.py", "import builtins\nbuiltins.eval('1')"),
    ),
    order_of_rooms: (
        ("launch/system/planted.py", "from cloze.launch.run import runs"),
        ("launch/config/planted.py", "from cloze.launch.system import memory"),
        (
            "launch/predict/planted.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cloze.launch.finetune.kind import Read",
        ),
        ("launch/serve/planted.py", "f = 'cloze.launch.tools.export:export'"),
        ("launch/attic/planted.py", "import os"),
    ),
    no_circles: (
        # Through the root, which imports launch/predict.
        ("launch/run/runs.py", "import cloze"),
        ("launch/texts/encoding.py", "import cloze\nfrom cloze.pipeline.errors import UserError"),
        ("launch/predict/predictor.py", "from cloze import load"),
        ("model/bert.py", "from cloze import __version__"),
        ("pipeline/errors.py", "def f():\n    from cloze.pipeline.storage import publish_text"),
        (
            "model/config.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cloze.model.bert import BertModel",
        ),
    ),
    imports_by_name_in_named_files: (
        ("model/planted.py", "import importlib\nimportlib.import_module('yaml')"),
        ("model/planted.py", "from importlib import import_module\nimport_module('cloze.' + 'launch')"),
        ("model/planted.py", "import importlib as i\nget = i.import_module"),
        ("launch/run/planted.py", "__import__('os')"),
        ("launch/run/planted.py", "import runpy\nrunpy.run_path('a.py')"),
        ("pipeline/jobs/executors.py", "import importlib\nimportlib.import_module('cloze.pipe' + 'line')"),
        ("launch/engine/repairs.py", "import importlib\nfor name in ('a', 'b'):\n    importlib.import_module(name)"),
    ),
    names_of_modules_are_whole: (
        ("pipeline/planted.py", "floor = 'launch'\nname = f'cloze.{floor}.run.runs'"),
        ("launch/commands.py", "def named(room):\n    return f'cloze.launch.{room}.command:main'"),
        ("launch/commands.py", "def named(room):\n    return 'cloze.launch.' + room"),
        ("launch/commands.py", "def named(package):\n    return f'{package}.launch.serve'"),
    ),
    draws_are_seeded: (
        ("pipeline/samples/planted.py", "import random\nrandom.random()"),
        ("pipeline/samples/planted.py", "from random import shuffle\nshuffle([])"),
        ("pipeline/samples/planted.py", "import random\nrandom.Random().random()"),
        ("launch/finetune/planted.py", "import numpy as np\nnp.random.permutation(3)"),
        ("launch/finetune/planted.py", "import numpy as np\nnp.random.default_rng()"),
        ("launch/finetune/planted.py", "from numpy.random import default_rng\ndefault_rng(None)"),
        ("launch/finetune/planted.py", "import numpy as np\nnp.random.seed(1)"),
    ),
    errors_are_for_users: (
        ("launch/tools/planted.py", "def f():\n    print('found no folder')\n    return 2"),
        ("launch/tools/planted.py", "import sys\nsys.stderr.write('found no folder')"),
        ("launch/tools/planted.py", "def f():\n    raise ValueError('found no folder')"),
        ("launch/predict/planted.py", "def f():\n    raise KeyError"),
        ("launch/predict/planted.py", "import sys\nsys.exit('found no folder')"),
        ("pipeline/planted.py", "raise SystemExit(2)"),
    ),
    fields_have_sentences: (
        ("launch/config/planted.py", "@dataclass(frozen=True)\nclass Planted:\n    steps: int = 1"),
        ("launch/serve/config.py", "@dataclass\nclass Planted:\n    steps: int = 1\n    '  '"),
        ("pipeline/config.py", "@dataclass\nclass Planted:\n    a: int = 1\n    b: int = 2\n    'Steps.'"),
    ),
    few_levels: (
        ("launch/texts/planted.py", "from cloze.launch.run import runs\nfrom cloze.launch.pretrained import hub"),
    ),
    imports_at_the_top: (
        ("launch/run/planted.py", "def f():\n    from cloze.pipeline.errors import UserError"),
        ("launch/run/planted.py", "if True:\n    import cloze.pipeline.errors"),
    ),
    no_pandas: (("pipeline/planted.py", "import pyarrow\npyarrow.uint16().to_pandas_dtype()"),),
    classes_have_names_of_their_own: (("pipeline/planted.py", "class BertConfig:\n    pass"),),
    functions_fit_a_screen: (("model/planted.py", "def f():\n" + "    pass\n" * (LONGEST_FUNCTION + 1)),),
}
