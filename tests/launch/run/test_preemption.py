"""Signals that ask a run to stop."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cloze.launch.run import preemption
from cloze.launch.run.preemption import StopRequest
from cloze.launch.run.status_file import read_status
from cloze.launch.system.environment import parents
from tests.forked import ForkedRun
from tests.launching import ROOT, pretrain_arguments, saved, step_of
from tests.synthetic import make_shards
from tests.terminal import terminal

# Locks a mutex twice: what a collective that never ends is to Python, C code that no signal interrupts.
HANGS = """
import ctypes, signal, time
from cloze.launch.run import preemption
from cloze.launch.run.preemption import StopRequest
preemption.ONE_REQUEST_SECONDS = 5  # a busy tester takes seconds for two signals
with StopRequest(say=lambda line: print(line, flush=True)) as stop:
    print("ready", flush=True)
    mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    while True:
        library.pthread_mutex_lock(mutex)
"""


def test_a_second_signal_ends_a_process_that_hangs():
    processes = {
        second: subprocess.Popen([sys.executable, "-c", HANGS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for second in (signal.SIGINT, signal.SIGUSR1)
    }
    for process in processes.values():
        assert process.stdout.readline() == "ready\n"
    for process in processes.values():
        process.send_signal(signal.SIGTERM)  # acknowledged though no Python runs
        assert process.stdout.readline().startswith("SIGTERM: stopping after this step, with a checkpoint; a second")
        process.send_signal(signal.SIGTERM)  # what torchrun forwards is the same request
    time.sleep(6)
    for second, process in processes.items():
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(timeout=20) == 128 + second


def test_a_launcher_that_is_gone_is_named(monkeypatch):
    """Its end comes as a SIGTERM, by the kernel or by a thread that looks."""
    assert preemption._cause(signal.SIGTERM) == "SIGTERM"
    monkeypatch.setattr(parents, "_WATCHING", {"parent": os.getppid()})
    assert preemption._cause(signal.SIGTERM) == "SIGTERM"
    monkeypatch.setattr(parents, "_WATCHING", {"parent": os.getpid()})
    assert preemption._cause(signal.SIGTERM).startswith("the launcher has ended")
    assert preemption._cause(signal.SIGUSR1) == "SIGUSR1"


def test_a_run_that_has_not_begun_ends_at_once_and_says_so():
    """Where no Python runs, as in an import that loads a library, and though its output is not read."""
    script = HANGS.replace(
        "from cloze.launch.run.preemption import StopRequest",
        "from cloze.launch.run.preemption import Starting, StopRequest",
    ).replace(
        "with StopRequest(say=lambda line: print(line, flush=True)) as stop:",
        "Starting.before_end(lambda: (time.sleep(0.5), print('released', flush=True)))\n"
        "with Starting(lambda line: (print(line, flush=True), time.sleep(60))):",
    )
    assert script.count("Starting") == 3
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == (
        "SIGTERM: stopped before the first step of this start, with nothing to save; the same command starts it again\n"
    )
    assert process.stdout.readline() == "released\n"
    assert process.wait(timeout=30) == 75


def test_signals_are_the_runs_own_from_its_first_step_on():
    """And not after its last one, also where the start is left later."""
    script = (
        "import signal\nfrom cloze.launch.run.preemption import Starting, StopRequest\n"
        "with Starting(print):\n    with StopRequest() as stop:\n        signal.raise_signal(signal.SIGUSR1)\n"
        "        assert stop.wanted\n    print('saved')\n"
        "with Starting(print):\n    with StopRequest():\n        pass\n"
        "with Starting(print):\n    pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "saved\n"
    script = script.replace("signal.raise_signal(signal.SIGUSR1)", "pass").replace("assert stop.wanted", "pass")
    ended = subprocess.run([sys.executable, "-c", script + "signal.raise_signal(signal.SIGTERM)\n"], cwd=ROOT)
    assert ended.returncode == -signal.SIGTERM


# Of a pipe whose reader is gone.
GONE = (
    "import gc, os, signal, sys, time\nfrom cloze.launch.run.preemption import Starting, StopRequest\n"
    "NUMBERS = signal.SIGTERM, signal.SIGUSR1\ndef gone(line):\n    raise BrokenPipeError\n"
)


@pytest.mark.parametrize("during", ["pass", "signal.raise_signal(signal.SIGTERM)"])
def test_what_has_ended_is_not_stopped(during):
    """Between a run's last step and the end of its process, which takes a second with torch; also by another copy of
    the signal that has stopped it, when Python has taken its handlers away.
    """
    script = GONE + (
        "import cloze.launch.cli as cli\nfrom cloze.__main__ import main\n"
        "def run():\n    cli.hear_stops()\n    with Starting(gone):\n        with StopRequest(say=gone):\n"
        f"            {during}\n        signal.raise_signal(signal.SIGTERM)\n"
        "        signal.raise_signal(signal.SIGINT)\n    return 3\n"
        "class Last:\n    def __del__(self, kill=os.kill, process=os.getpid(), numbers=NUMBERS):\n"
        "        for number in numbers:\n            kill(process, number)\n"
        # A cycle is collected when Python has taken its handlers away.
        "gc.disable()\nlast = Last()\nlast.itself, last = last, None\ncli.main = run\nsys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_start_that_is_stopped_ends_though_nobody_reads_its_line():
    script = GONE + "with Starting(gone):\n    signal.raise_signal(signal.SIGTERM)\n    time.sleep(60)\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")


def test_a_run_whose_output_nobody_reads_any_more_stops_with_a_checkpoint(tmp_path):
    """As with `| tee log`, which the same Ctrl-C ends: the next line was an error, and the steps were lost."""
    words = ("--train.max_steps", "5000", "--train.log_every_steps", "1", "--checkpoint.every_steps", "0")
    run = ForkedRun(pretrain_arguments(make_shards(tmp_path / "data"), tmp_path / "run", *words), processes=2)
    until = time.monotonic() + 60
    while "step 3/" not in run.printed():
        assert time.monotonic() < until
    run.lose_reader()
    status = read_status(tmp_path / "run")
    assert run.returncode == 75 and status["state"] == "requeue"
    assert 3 <= status["step"] == step_of(tmp_path / "run") < 5000
    assert [checkpoint.name for checkpoint in saved(tmp_path / "run")] == [f"step-{status['step']:08}"]


# In a terminal of its own, which is closed at the word "ready".
CLOSED = """
import os, pty, signal, sys, time
from cloze.launch.run.preemption import StopRequest
from cloze.launch.system.console import Console, counting
from cloze.launch.system.environment.process import open_standard_streams
child, terminal = pty.fork()
if not child:
    signal.signal(signal.SIGHUP, signal.{answer})
    open_standard_streams()
    console = Console()
    with StopRequest(say=console.say) as stop, counting("steps") as count:
        console.say("ready")
        for _ in range({tenths}):
            time.sleep(0.1)
            count()
            if stop.wanted:
                break
    console.say("line")
    os._exit(75 if stop.cause == "SIGHUP" else 3)
while b"ready" not in os.read(terminal, 1000):
    pass
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("answer", "tenths", "status"), [("SIG_DFL", 600, 75), ("SIG_IGN", 10, 3)])
def test_a_run_whose_terminal_is_closed_stops_unless_nohup_has_started_it(answer, tenths, status):
    """With lines and bars that can't be written any more."""
    script = CLOSED.format(answer=answer, tenths=tenths)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (status, b"")


def test_a_run_says_that_it_stops_where_the_terminal_is_still_open():
    script = (
        "import signal, threading\nfrom cloze.launch.run.preemption import StopRequest\n"
        "said = threading.Event()\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests\n"
        "with StopRequest(say=lambda line: (print(line), said.set())):\n    signal.raise_signal(signal.SIGHUP)\n"
        "    said.wait(60)\nprint('saved')\n"
    )
    with terminal() as (stream, shown):
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=stream, check=True)
    assert shown.startswith(b"SIGHUP: stopping after this step") and shown.endswith(b"saved\r\n")


def test_a_late_copy_of_the_signal_does_not_take_the_exit_status():
    """Where each process gets its own signal, as from srun, the quickest has stopped already when its own signal
    comes."""
    script = (
        "import signal, time\nfrom cloze.launch.run import preemption\npreemption.ONE_REQUEST_SECONDS = 0.0\n"
        "with preemption.StopRequest() as stop:\n    signal.raise_signal(signal.SIGUSR1)\nassert stop.wanted\n"
        "time.sleep(0.1)\nsignal.raise_signal(signal.SIGUSR1)\ntime.sleep(0.5)\nraise SystemExit(75)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 75


def test_signals_are_what_they_were_afterwards():
    script = (
        "import signal\nfrom cloze.launch.run.preemption import StopRequest\n"
        "for _ in range(300):\n    with StopRequest() as stop:\n        pass\n"
        "assert not stop.wanted\nsignal.raise_signal(signal.SIGTERM)\n"
    )
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGTERM


def test_the_end_of_the_job_comes_when_its_time_has_passed_whatever_the_clock_says(monkeypatch):
    clock, elapsed, since = time.time(), 0.0, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: since + elapsed)
    monkeypatch.setattr(time, "time", lambda: clock)
    stop = StopRequest(clock + 600)
    clock += 3600  # set anew
    assert not stop.wanted
    clock, elapsed = clock - 7200, 601.0
    assert stop.wanted
