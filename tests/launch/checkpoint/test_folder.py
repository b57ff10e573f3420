"""Which folders are checkpoints, and which of them are good."""

from cloze.launch.checkpoint.folder import CheckpointFolder


def test_a_folder_whose_name_has_other_digits_is_no_checkpoint(folder):
    for name in ("step-²", "step-", "step-x"):
        (folder / name).mkdir()
    assert CheckpointFolder(folder, print).steps() == [1, 2, 3, 4]


def test_a_damaged_one_is_reported_once_and_passed_over(folder):
    (folder / "step-00000004/weights.pt").write_bytes(b"cut")
    warnings = []
    checkpoints = CheckpointFolder(folder, warnings.append)
    assert [checkpoints.latest(), checkpoints.latest()] == [3, 3]
    (warning,) = warnings
    assert warning.startswith(f"{folder}/step-00000004: damaged (weights.pt has 3 bytes"), warning
    assert [step for step in range(6) if checkpoints.is_good(step)] == [1, 2, 3]
    assert [step for step in range(6) if CheckpointFolder(folder, print).is_good(step)] == [1, 2, 3]
