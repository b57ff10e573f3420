"""A Slurm of two hosts: munged, slurmctld and two slurmd of our own, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloze.launch.system.environment.launchers import child_variables
from tests.clusters.hosts import HOSTS, Unavailable, on, require, two_hosts
from tests.launching import PATIENCE_SECONDS, ROOT

CONTROLLER = "host-a"
# No accounting, no cgroups, no limits: what a job script meets are allocation, signals, preemption and requeue. The two
# GPUs a host are numbers only.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={hosts} CPUs=4 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 OverSubscribe=NO
PartitionName=high Nodes=ALL PriorityTier=2 OverSubscribe=NO
"""


class Slurm:
    """What a user does with it: submit, ask, cancel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{child_variables()['PATH']}"
        self.variables = child_variables(
            SLURM_CONF=str(folder / "slurm.conf"), PATH=path, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1"
        )

    def call(self, *command: str, refusal: str | None = None) -> str:
        """Run a command of Slurm's where the controller is. It may be refused with `refusal`, and with nothing else."""
        result = subprocess.run(
            on(CONTROLLER, self.folder, *command),
            cwd=ROOT,
            env=self.variables,
            text=True,
            capture_output=True,
            timeout=60,
        )
        refused = refusal is not None and refusal in result.stderr
        assert result.returncode == 0 or refused, f"{command}: {result.stderr}"
        return result.stdout

    def submit(self, log: Path, *words: str) -> str:
        """sbatch; returns the job's number."""
        return self.call("sbatch", "--parsable", f"--output={log}", *words).strip()

    def states(self, job: str) -> set[str]:
        """States of a job, of all its elements if it is an array, such as RUNNING, PENDING, COMPLETED; while processes
        of a start that ended are still being waited for, COMPLETING.
        """
        found = self.call("squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%T").split()
        assert found, f"job {job} is forgotten"
        return set(found)

    def wait_for(self, job: str, *states: str, seconds: float = PATIENCE_SECONDS, log: Path | None = None) -> None:
        """Until every element of the job is in one of the states."""
        deadline = time.monotonic() + seconds
        while not (found := self.states(job)) <= set(states):
            text = log.read_text()[-4000:] if log and log.exists() else ""
            if time.monotonic() > deadline:
                known = self.call("scontrol", "show", "job", job)
                raise AssertionError(f"job {job} is {found}, not {states}\n{known}\n{text}")
            time.sleep(0.3)

    def start_requeued(self, job: str) -> None:
        """Slurm lets a requeued job wait two minutes, so that what made it fail may pass; not here."""
        self.wait_for(job, "PENDING")
        # A host refuses a start whose credential is not younger, by whole seconds, than the end of the one before; the
        # job would be FAILED without a line of output.
        time.sleep(2)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.states(job) == {"PENDING"}:
            assert time.monotonic() < deadline, self.call("scontrol", "show", "job", job)
            # Its time may come between the look and the update.
            self.call("scontrol", "update", f"JobId={job}", "StartTime=now", refusal="no longer pending")
            time.sleep(1)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start the daemons, and end them with all that they have started.

    Args:
        folder: of a short name, since it holds a socket.

    Raises:
        Unavailable: Slurm is not installed, or a daemon does not start here.
    """
    require("munged", "slurmctld", "slurmd", "sbatch")
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(controller=CONTROLLER, folder=folder, hosts=",".join(HOSTS))
    )
    (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    names = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munge.pid",
        "log-file": "munge.log",
        "seed-file": "munge.seed",
    }
    munge = ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in names.items())]
    daemons: list[subprocess.Popen] = []
    with two_hosts(folder):
        cluster = Slurm(folder)
        commands = [
            munge,
            on(CONTROLLER, folder, "slurmctld", "-D"),
            *(on(host, folder, "slurmd", "-D") for host in HOSTS),
        ]
        try:
            for command in commands:
                with open(folder / "daemons.log", "ab") as log:
                    daemons.append(subprocess.Popen(command, env=cluster.variables, stdout=log, stderr=log))
            _wait_until_idle(cluster, daemons)
            yield cluster
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(timeout=PATIENCE_SECONDS)


def _wait_until_idle(cluster: Slurm, daemons: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 60
    while True:
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        try:
            states = cluster.call("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split()
        except AssertionError:
            states = []
        if states == ["idle"] * len(HOSTS):
            return
        if ended or time.monotonic() > deadline:
            logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in cluster.folder.glob("*.log"))
            raise Unavailable(f"Slurm does not start: {states}, ended {ended}\n{logs}")
        time.sleep(0.3)
