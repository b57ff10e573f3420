"""One job at a time writes a run; of runs in object stores tests/stores/test_stored_run.py."""

import signal
import time

from cloze.launch.run.run_locks import in_use
from tests.forked import ForkedRun
from tests.launching import finish, pretrain_arguments, step_of, train
from tests.synthetic import make_shards


def test_two_jobs_do_not_share_a_run(tmp_path):
    data = make_shards(tmp_path / "data")
    assert not in_use(tmp_path / "run")
    first = ForkedRun(pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "100000"))
    while step_of(tmp_path / "run") < 1:
        assert first.poll() is None
        time.sleep(0.01)
    assert in_use(tmp_path / "run")
    output = train(data, tmp_path / "run", "--train.max_steps", "100000", status=2)
    assert "in use by another job" in output.splitlines()[-1]
    first.send_signal(signal.SIGTERM)
    finish(first, status=75)
    assert not in_use(tmp_path / "run")
