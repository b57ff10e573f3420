"""Tests mirror the rooms and carry the names of modules.

A module `FLOOR/ROOM/NAME.py` is tested in `tests/FLOOR/ROOM/test_NAME.py`; if that needs several processes, a fake GPU
or a server of a store, in the `test_NAME.py` of their folder; or with its room in a file that is named after the room
and imports the module. TESTED_IN lists the modules that are tested elsewhere, by the reason: parts of a command are
tested through it.
"""

import ast
import functools
from collections import Counter
from pathlib import Path

from tests.architecture.laws import ROOT, arrows, file_of, imported, read_sources

NEEDS = ("distributed", "gpu", "stores")
SHARED = {"precheck"}  # modules of one name in several rooms, which are tested together
MOST_EXCUSED = 30

L, P = "tests/launch", "tests/pipeline"
# Module -> the test file.
TESTED_IN = {
    # Fields of configurations, whose checks are those of the commands that read them.
    "launch/predict/config.py": f"{L}/predict/test_command.py",
    "launch/serve/config.py": f"{L}/serve/test_app.py",
    # Whole runs, in several processes, killed and resumed.
    "launch/checkpoint/weight_averages.py": f"{L}/training/test_weight_average.py",
    "launch/pretrain/command.py": "tests/distributed/test_resume.py",
    "launch/pretrain/pretraining_run.py": "tests/distributed/test_resume.py",
    "launch/pretrain/first_model.py": "tests/distributed/test_exactness.py",
    "launch/pretrain/validation.py": f"{L}/pretrain/test_data.py",
    "launch/training/callbacks.py": f"{L}/system/test_plugins.py",
    "launch/training/evaluation.py": f"{L}/pretrain/test_data.py",
    "launch/training/objective.py": "tests/distributed/test_exactness.py",
    "launch/training/loop.py": "tests/distributed/test_resume.py",
    "launch/training/totals.py": "tests/distributed/test_resume.py",
    "launch/training/recipe.py": "tests/distributed/test_resume.py",
    "launch/training/start.py": "tests/distributed/test_resume.py",
    "launch/training/start_table.py": "tests/distributed/test_precision.py",
    "launch/training/curves.py": f"{L}/run/test_metrics.py",
    "launch/pretrain/sample_predictions.py": f"{L}/run/test_metrics.py",
    "launch/pretrain/source_statistics.py": f"{L}/pretrain/test_data.py",
    # Parts of fine-tuning, through runs of it.
    "launch/finetune/command.py": f"{L}/finetune/test_combinations.py",
    "launch/finetune/finetuning_run.py": f"{L}/finetune/test_combinations.py",
    "launch/pretrained/finding.py": f"{L}/pretrained/test_hub.py",
    # Operations, each against transformers, by Python and by the command.
    "launch/predict/choices.py": f"{L}/finetune/test_predict_what_was_trained.py",
    "launch/system/software.py": f"{L}/tools/test_export.py",
    # Parts of preparation, through the whole job.
    "pipeline/jobs/reports.py": f"{P}/jobs/test_prepare.py",
    "pipeline/records.py": f"{P}/shards/test_reader.py",
    # Rooms of one test file, through their command or their table.
    "launch/engine/checkpoint_files.py": f"{L}/checkpoint/test_writing.py",
    "launch/engine/fragments.py": "tests/distributed/test_elastic.py",
    "launch/evaluate/config.py": f"{L}/evaluate/test_command.py",
    "launch/evaluate/report.py": f"{L}/evaluate/test_command.py",
    "launch/pretrain/objectives/distillation.py": f"{L}/pretrain/test_objectives.py",
}
# Tests of what several modules do together.
BEHAVIOURS = {
    "launch": {"test_errors", "test_families_in_use"},
    "launch/checkpoint": {"test_hostile_states"},
    "launch/finetune": {
        "test_chinese",
        "test_combinations",
        "test_own_table",
        "test_pieces",
        "test_predict_what_was_trained",
    },
    "launch/parsing": {"test_named_files"},
    "launch/pretrain": {"test_objectives_of_families"},
    "launch/tools": {"test_push"},
    "model": {"test_cuda", "test_electra", "test_gpu_paths", "test_variants"},
    "pipeline": {"test_hostile_values", "test_two_lines"},
    "pipeline/jobs": {"test_families", "test_interruptions", "test_memory"},
    "pipeline/shards": {"test_data_format"},
}


@functools.cache
def modules() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for floor in ("launch", "model", "pipeline")
        for path in sorted((ROOT / floor).rglob("*.py"))
        if path.name != "__init__.py"
    ]


@functools.cache
def shared_names() -> set[str]:
    """File names that modules of several rooms have."""
    counted = Counter(Path(each).name for each in modules())
    return {name for name, count in counted.items() if count > 1}


@functools.cache
def imported_by(test: Path) -> set[str]:
    """The files that a test file imports, and those that a room's `__init__.py`, which it imports, hands out."""
    found = {file_of(name, read_sources()) for name in imported(ast.parse(test.read_text(encoding="utf-8")))} - {None}
    rooms = {path for path in found if path.endswith("/__init__.py")}
    return found.union(*(arrows({path: read_sources()[path]}, read_sources())[path] for path in rooms))


def own_tests(module: str) -> list[Path]:
    """The test files of a module's name, and those of its room's name that import it."""
    path = Path(module)
    folder, name = ROOT / "tests" / path.parent, f"test_{path.stem}.py"
    own = [folder / name]
    if len(path.parts) > 2:
        if path.name in shared_names():  # as precheck.py: one file
            own += [ROOT / "tests" / path.parts[0] / name] if path.stem in SHARED else []
        rooms = [each / f"test_{path.parent.name}.py" for each in (folder, folder.parent)]
        elsewhere = [ROOT / "tests" / each / name for each in NEEDS]
        own += [each for each in rooms + elsewhere if each.exists() and module in imported_by(each)]
    return [each for each in own if each.exists()]


def only_declares(module: str) -> bool:
    """Whether a module has no function, so that a test has nothing to call: names of types, protocols, exceptions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return not any(isinstance(node, functions) for node in ast.walk(read_sources()[module]))


def test_every_module_has_tests_where_its_name_says_or_where_the_list_says():
    for module in modules():
        if only_declares(module):
            assert module not in TESTED_IN, f"{module} has no function to test: take it off the list"
            continue
        own = own_tests(module)
        assert own or module in TESTED_IN, f"{module}: no tests/{module.removesuffix('.py')} with test_ before its name"
        assert not (own and module in TESTED_IN), f"{module} has {own[0]}: take it off the list"


def test_an_untested_module_beside_a_test_file_of_its_room_is_found():
    for module in ("launch/evaluate/planted.py", "launch/engine/optimizers/planted.py", "pipeline/readers/planted.py"):
        assert not own_tests(module)


def test_what_the_list_names_is_there():
    assert len(TESTED_IN) <= MOST_EXCUSED, "name tests after modules, or move them"
    assert set(TESTED_IN) <= set(modules())
    for test in set(TESTED_IN.values()):
        assert (ROOT / test).exists(), test


def test_every_test_file_of_a_room_is_named_after_a_module_or_listed():
    named = {own for module in modules() for own in own_tests(module)}
    for floor in ("launch", "model", "pipeline"):
        for path in (ROOT / "tests" / floor).rglob("test_*.py"):
            folder = str(path.parent.relative_to(ROOT / "tests"))
            listed = path.stem in BEHAVIOURS.get(folder, ())
            assert path in named or listed, f"{path}: no module of this name in {folder}/, and not in BEHAVIOURS"
            assert not (path in named and listed), f"{path}: a module has its name; take it off BEHAVIOURS"
