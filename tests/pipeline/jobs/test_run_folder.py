"""What tells the files of one run of preparation from another's."""

import pytest

from cloze.pipeline.jobs.reports import is_count, load_report, save_report
from cloze.pipeline.jobs.run_folder import BEGUN_AS, mark_of, take_over
from cloze.pipeline.stores.places import StorePath


def test_a_mark_is_that_of_a_file_in_a_run(tmp_path):
    marks = {mark_of(tmp_path / run / name) for run in ("run-a", "run-b") for name in ("task-1.json", "task-2.json")}
    assert len(marks) == 4
    assert mark_of(StorePath("s3", "bucket", "x/run-a/task-1.json")) == mark_of(tmp_path / "run-a/task-1.json")


@pytest.mark.parametrize("times", [1, 2])
def test_files_keep_their_marks_when_their_folder_is_taken_over(tmp_path, times):
    (tmp_path / "run-0").mkdir()
    save_report(tmp_path / "run-0/task-1.json", {"parts": 3})
    for number in range(times):
        take_over(tmp_path / f"run-{number}", tmp_path / f"run-{number + 1}")
    own = tmp_path / f"run-{times}"
    kinds = {"parts": is_count}
    assert load_report(own / "task-1.json", kinds) == {"parts": 3} and (own / BEGUN_AS).read_text() == "run-0"
    (own / "task-1.json").rename(own / "task-2.json")
    assert load_report(own / "task-2.json", kinds) is None, "another one in its place"
