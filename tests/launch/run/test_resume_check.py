"""What shapes the result of a run is compared at each start."""

from dataclasses import asdict

import pytest
import yaml

from cloze.launch.commands import parse
from cloze.launch.run.resume_check import check_folder
from cloze.pipeline.errors import UserError


@pytest.mark.parametrize("before,after", [("fp32", "bf16"), ("bf16", "autocast")])
def test_optimizer_states_of_bf16_do_not_become_others_where_they_are_divided(before, after, tmp_path):
    """DeepSpeed gives their files other names, and the start would end with one that is missing."""
    words = ["--data", "d", "--output", str(tmp_path), "--zero.stage", "1", "--checkpoint.accept_changes", "true"]
    save = parse("pretrain", [*words, "--train.precision", before])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(save)))
    (tmp_path / "data.json").write_text("{}")
    check_folder(parse("pretrain", [*words, "--train.precision", after]), {})  # there are no states yet
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    with pytest.raises(UserError) as refused:
        check_folder(parse("pretrain", [*words, "--train.precision", after]), {})
    assert f"train.precision is {before!r}, expected {after!r}: at zero.stage 1" in str(refused.value)
    assert f"keep --train.precision {before}, or begin a new run with its weights by --init_from" in str(refused.value)
    # Without ZeRO all are fp32, and autocast's are at any stage.
    check_folder(parse("pretrain", [*words, "--train.precision", after, "--zero.stage", "0"]), {})
    if before == "fp32":
        check_folder(parse("pretrain", [*words, "--train.precision", "autocast"]), {})


@pytest.mark.parametrize("name", ["data.json", "deepspeed.json", "status.json"])
def test_files_of_a_user_with_a_run_s_names_are_refused(tmp_path, name):
    """An interrupted start has left its lock beside them."""
    words = ["--data", "d", "--output", str(tmp_path)]
    (tmp_path / name).write_text("[]")
    with pytest.raises(UserError, match=f"found .* with files that are not a run's .*{name}"):
        check_folder(parse("pretrain", words), {})
    (tmp_path / ".lock").write_text("")
    check_folder(parse("pretrain", words), {})
