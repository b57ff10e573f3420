"""Tests mirror the rooms and carry the names of modules.

A module `FLOOR/ROOM/NAME.py` is tested in `tests/FLOOR/ROOM/test_NAME.py`, or together with its whole room in a file
named after the room. TESTED_IN lists the modules that are tested elsewhere, by the reason: what needs several
processes, a fake GPU or a server of a store has a folder of its own, and parts of a command are tested through it.
"""

from pathlib import Path

from tests.architecture.laws import ROOT

L, P = "tests/launch", "tests/pipeline"
# Module -> the test file.
TESTED_IN = {
    # Fields of configurations, whose checks are those of the commands that read them.
    "launch/config/checks.py": f"{L}/test_errors.py",
    "launch/config/commands.py": f"{L}/test_errors.py",
    "launch/config/data.py": f"{L}/pretrain/test_data.py",
    "launch/config/embedding.py": f"{L}/finetune/examples/test_contrastive.py",
    "launch/config/finetuning.py": f"{L}/finetune/test_combinations.py",
    "launch/config/model.py": f"{L}/pretrained/test_hub.py",
    "launch/config/optimization.py": f"{L}/test_errors.py",
    "launch/config/pretraining.py": f"{L}/test_errors.py",
    "launch/config/running.py": f"{L}/test_errors.py",
    "launch/config/tasks.py": f"{L}/config/test_metrics.py",
    "launch/predict/config.py": f"{L}/predict/test_command.py",
    "launch/serve/config.py": f"{L}/serve/test_app.py",
    "launch/tools/planning/config.py": f"{L}/tools/test_plan.py",
    "pipeline/config.py": f"{P}/jobs/test_planning.py",
    # The command line and what is refused before a run begins.
    "launch/cli.py": f"{L}/test_errors.py",
    "launch/commands.py": f"{L}/parsing/test_help_pages.py",
    "launch/system/endings.py": f"{L}/test_errors.py",
    "launch/parsing/error_messages.py": f"{L}/parsing/test_help_pages.py",
    "launch/parsing/fields.py": f"{L}/parsing/test_help_pages.py",
    **{
        f"launch/{room}/precheck.py": f"{L}/test_precheck.py"
        for room in ("finetune", "predict", "pretrain", "pretrained")
    },
    # Whole runs, in several processes, killed and resumed.
    "launch/checkpoint/averages.py": f"{L}/training/test_averaging.py",
    "launch/checkpoint/deepspeed_files.py": "tests/distributed/test_elastic.py",
    "launch/checkpoint/state.py": f"{L}/test_errors.py",
    "launch/pretrain/command.py": "tests/distributed/test_resume.py",
    "launch/pretrain/recipe.py": "tests/distributed/test_resume.py",
    "launch/pretrain/inputs.py": f"{L}/test_errors.py",
    "launch/pretrain/first_model.py": "tests/distributed/test_exactness.py",
    "launch/pretrain/validation.py": f"{L}/pretrain/test_data.py",
    "launch/run/runs.py": "tests/distributed/test_resume.py",
    "launch/training/callbacks.py": f"{L}/system/test_own_classes.py",
    "launch/training/evaluation.py": f"{L}/pretrain/test_data.py",
    "launch/training/objective.py": "tests/distributed/test_exactness.py",
    "launch/training/loop.py": "tests/distributed/test_resume.py",
    "launch/training/totals.py": "tests/distributed/test_resume.py",
    "launch/training/process.py": "tests/gpu/test_devices.py",
    "launch/training/resuming.py": "tests/distributed/test_resume.py",
    "launch/training/recipe.py": "tests/distributed/test_resume.py",
    "launch/training/start.py": "tests/distributed/test_resume.py",
    "launch/training/facts.py": "tests/distributed/test_precision.py",
    "launch/training/curves.py": f"{L}/run/test_metrics.py",
    "launch/training/saving.py": "tests/distributed/test_resume.py",
    "launch/training/throughput.py": f"{L}/run/test_metrics.py",
    "launch/training/profiling.py": f"{L}/run/test_metrics.py",
    "launch/pretrain/sample_predictions.py": f"{L}/run/test_metrics.py",
    "launch/pretrain/sources.py": f"{L}/pretrain/test_data.py",
    # On a GPU that exists in name only, where kernels and host waits are counted.
    "launch/system/devices.py": "tests/gpu/test_devices.py",
    "model/flash.py": "tests/model/test_gpu_paths.py",
    # With a server that speaks for an object store.
    "launch/checkpoint/fetching.py": "tests/stores/test_stored_checkpoints.py",
    "launch/checkpoint/scratch.py": "tests/stores/test_stored_checkpoints.py",
    "launch/checkpoint/stored.py": "tests/stores/test_stored_checkpoints.py",
    "launch/checkpoint/transfer.py": "tests/stores/test_commits.py",
    "launch/run/commits.py": "tests/stores/test_commits.py",
    "launch/run/segments.py": "tests/stores/test_commits.py",
    "launch/run/stored.py": "tests/stores/test_holding.py",
    "pipeline/stores/cache.py": "tests/stores/test_reading.py",
    "pipeline/stores/clients.py": "tests/stores/test_clients.py",
    "pipeline/stores/leases.py": "tests/stores/test_holding.py",
    "pipeline/stores/places.py": "tests/stores/test_clients.py",
    "pipeline/stores/reading.py": "tests/stores/test_reading.py",
    "pipeline/stores/scratch.py": "tests/stores/test_stored_runs.py",
    "pipeline/stores/shared.py": "tests/stores/test_shared.py",
    # Parts of fine-tuning, through runs of it.
    "launch/finetune/command.py": f"{L}/finetune/test_combinations.py",
    "launch/finetune/recipe.py": f"{L}/finetune/test_combinations.py",
    "launch/finetune/contrastive.py": f"{L}/finetune/examples/test_contrastive.py",
    "launch/finetune/job.py": f"{L}/finetune/test_combinations.py",
    "launch/finetune/kinds.py": f"{L}/finetune/examples/test_classification.py",
    "launch/finetune/objective.py": f"{L}/finetune/examples/test_answering.py",
    "launch/finetune/schemes.py": f"{L}/finetune/examples/test_tagging.py",
    "launch/finetune/scoring.py": f"{L}/finetune/examples/test_contrastive.py",
    "launch/finetune/examples/base.py": f"{L}/finetune/examples/test_classification.py",
    "launch/finetune/examples/choice.py": f"{L}/finetune/examples/test_tagging.py",
    "launch/finetune/examples/predicted.py": f"{L}/finetune/test_error_analysis.py",
    "launch/finetune/examples/similarity.py": f"{L}/finetune/examples/test_contrastive.py",
    "launch/pretrained/finding.py": f"{L}/pretrained/test_hub.py",
    "launch/pretrained/loaded.py": f"{L}/predict/test_predictor.py",
    "launch/pretrained/loading.py": f"{L}/tools/test_export.py",
    "launch/pretrained/source.py": f"{L}/finetune/test_models.py",
    "launch/run/sweeps.py": f"{L}/finetune/test_sweep.py",
    # Operations, each against transformers, by Python and by the command.
    **{
        f"launch/predict/{name}.py": f"{L}/predict/test_predictor.py"
        for name in ("answers", "arguments", "blanks", "choices", "labels", "operation", "tags", "tokens", "vectors")
    },
    **{
        f"launch/predict/{name}.py": f"{L}/predict/test_command.py"
        for name in ("default_operation", "files", "output", "tokenize")
    },
    "launch/texts/encoding.py": f"{P}/samples/test_assembly.py",
    "launch/texts/sequences.py": f"{P}/samples/test_assembly.py",
    "launch/texts/vectors.py": f"{L}/finetune/examples/test_contrastive.py",
    # The server and the smaller commands.
    "launch/serve/asgi.py": f"{L}/serve/test_app.py",
    "launch/serve/batching.py": f"{L}/serve/test_app.py",
    "launch/serve/command.py": f"{L}/serve/test_app.py",
    "launch/serve/connections.py": f"{L}/serve/test_limits.py",
    "launch/serve/keys.py": f"{L}/serve/test_limits.py",
    "launch/system/console.py": f"{P}/test_progress.py",
    "launch/system/memory.py": f"{L}/pretrain/test_probing.py",
    "launch/system/software.py": f"{L}/tools/test_export.py",
    "launch/tools/card.py": f"{L}/tools/test_export.py",
    "launch/tools/data.py": f"{P}/jobs/test_inspecting.py",
    "launch/tools/doctor_checks.py": f"{L}/tools/test_doctor.py",
    "launch/tools/quickstart.py": "tests/end_to_end/test_chain.py",
    "launch/tools/planning/assumptions.py": f"{L}/tools/planning/test_estimate.py",
    "launch/tools/planning/machines.py": f"{L}/system/test_data_sheets.py",
    # Stages of preparation, through the whole job; kinds of input, through what reads all of them.
    "pipeline/allocator.py": f"{L}/system/test_environment.py",
    "pipeline/errors.py": f"{L}/test_errors.py",
    "pipeline/extras.py": "tests/test_install.py",
    "pipeline/jobs/build_stage.py": f"{P}/jobs/test_prepare.py",
    "pipeline/jobs/parts.py": f"{P}/jobs/test_exchange_stage.py",
    "pipeline/jobs/reports.py": f"{P}/jobs/test_prepare.py",
    "pipeline/jobs/sources.py": f"{P}/jobs/test_interruptions.py",
    "pipeline/jobs/tokenize_stage.py": f"{P}/jobs/test_prepare.py",
    "pipeline/jobs/verifying.py": f"{P}/jobs/test_inspecting.py",
    "pipeline/loading/collate.py": f"{P}/test_two_lines.py",
    "pipeline/loading/streams.py": f"{P}/loading/test_batches.py",
    "pipeline/records.py": f"{P}/shards/test_shards.py",
    "pipeline/storage.py": f"{P}/jobs/test_interruptions.py",
    "pipeline/tokenization/words.py": f"{P}/tokenization/test_tokenizer.py",
    "pipeline/yaml_text.py": f"{L}/test_errors.py",
    # Layers of the model, through the models that are compared with transformers.
    "model/attention.py": "tests/model/test_variants.py",
    "model/embeddings.py": "tests/model/test_variants.py",
    "model/flops.py": "tests/model/test_config.py",
    "model/initialization.py": "tests/model/test_config.py",
    "model/inputs.py": "tests/model/test_variants.py",
    "model/sampling.py": "tests/model/test_electra.py",
    "model/sentences.py": "tests/model/test_encoder.py",
}
# Tests of what several modules do together.
BEHAVIOURS = {
    "launch": {"test_errors", "test_precheck"},
    "launch/finetune": {
        "test_chinese",
        "test_combinations",
        "test_own_table",
        "test_pieces",
        "test_predict_what_was_trained",
    },
    "launch/tools": {"test_push"},
    "model": {"test_cuda", "test_electra", "test_gpu_paths", "test_variants"},
    "pipeline": {"test_two_lines"},
    "pipeline/jobs": {"test_interruptions", "test_memory"},
    "pipeline/shards": {"test_data_format"},
}


def modules() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for floor in ("launch", "model", "pipeline")
        for path in sorted((ROOT / floor).rglob("*.py"))
        if path.name != "__init__.py"
    ]


def own_tests(module: str) -> list[Path]:
    """The test files of a module's name, and of its room's."""
    path = Path(module)
    folder = ROOT / "tests" / path.parent
    names = [folder / f"test_{path.stem}.py"]
    if len(path.parts) > 2:
        names += [folder / f"test_{path.parent.name}.py", folder.parent / f"test_{path.parent.name}.py"]
    return [each for each in names if each.exists()]


def test_every_module_has_tests_where_its_name_says_or_where_the_list_says():
    for module in modules():
        own = own_tests(module)
        assert own or module in TESTED_IN, f"{module}: no tests/{module.removesuffix('.py')} with test_ before its name"
        assert not (own and module in TESTED_IN), f"{module} has {own[0]}: take it off the list"


def test_what_the_list_names_is_there():
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
