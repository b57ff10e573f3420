"""`cloze doctor`: checks whether this environment can train, on all its machines, each check with a time limit."""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from cloze.launch.config import DoctorConfig
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.launch.system.devices import work_on
from cloze.launch.system.environment.launchers import Environment, read_environment
from cloze.launch.system.environment.process import prepare_deepspeed
from cloze.launch.tools import doctor_checks
from cloze.launch.tools.doctor_checks import Finding
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import is_url, to_place

EXIT_PROBLEM = 2
_VERDICTS = ("skipped", "ok", "warning", "problem")
# If all checks of a rank run into their time limits, the other ranks wait for the sum of the limits.
_PATIENCE = 8


def doctor(config: DoctorConfig) -> int:
    """Run all checks, print the table on rank 0 and return the exit status: 2 if there is a problem on any rank."""
    if is_url(config.output):
        raise UserError(f"output: found {config.output}, expected a folder: a run tries an object store at its start")
    environment = read_environment()
    prepare_deepspeed(environment)
    console = Console(environment.is_main)
    examiner = _Examiner(config.timeout_seconds)
    timeout = datetime.timedelta(seconds=_PATIENCE * config.timeout_seconds)
    devices: list[torch.device] = []

    def join() -> list[Finding]:
        devices.append(distributed.initialize(environment, timeout))
        return []

    joined = examiner.run(
        "processes",
        join,
        seconds=timeout.total_seconds(),
        advice="see that every machine was started, that their names resolve and that no firewall stands between them",
    )
    device = devices[0] if joined else None
    examiner.run("versions", doctor_checks.versions)
    if device is not None:
        examiner.device = device
        work_on(device)
        examiner.run("device", lambda: doctor_checks.device(device))
        # Saved by one process per machine, since processes share the file.
        keeps = environment.local_rank == 0
        examiner.run("matrix product", lambda: doctor_checks.matrix_product(device, keeps))
        examiner.run("memory bandwidth", lambda: doctor_checks.memory_bandwidth(device, keeps))
        examiner.run("compilation", lambda: doctor_checks.compilation(device))
    examiner.run("shared memory", lambda: doctor_checks.shared_memory(device, environment.world_size))
    if output := config.output:
        examiner.run("output", lambda: doctor_checks.output(Path(output), environment.rank))
    else:
        examiner.findings.append(Finding("output", "give --output: the folder where runs will be written", "skipped"))
    if data := config.data:
        examiner.run(
            "data",
            lambda: doctor_checks.data(
                to_place(data), environment.rank, environment.world_size, config.timeout_seconds / 2
            ),
        )
    else:
        examiner.findings.append(Finding("data", "give --data: a folder that cloze prepare wrote", "skipped"))
    together = None if device is None else _together(examiner, config, environment, device, timeout)
    findings = examiner.findings if together is None else together
    failed = any(finding.verdict == "problem" for finding in findings)
    # A rank that failed before the collective prints its own findings.
    _print(console if together else Console(), findings)
    if together:
        distributed.barrier()  # a launcher ends all processes when one fails, rank 0 possibly before it has printed
    if examiner.hangs:
        sys.stdout.flush()
        os._exit(EXIT_PROBLEM)  # threads that never return would block a normal exit
    distributed.shutdown()
    return EXIT_PROBLEM if failed else 0


def _together(
    examiner: _Examiner,
    config: DoctorConfig,
    environment: Environment,
    device: torch.device,
    timeout: datetime.timedelta,
) -> list[Finding] | None:
    """Run the collective checks, and merge the findings of all ranks; None if that failed."""
    gathered: list[str] = []

    def together() -> list[Finding]:
        findings = [doctor_checks.processes(environment, device), *doctor_checks.clock(device, environment.world_size)]
        findings += doctor_checks.collective(device, environment.world_size, config.recipe)
        if config.output and environment.world_size > 1:
            findings += doctor_checks.shared_folder(Path(config.output), environment)
        text = json.dumps([asdict(finding) for finding in [*findings, *examiner.findings]])
        gathered.extend(distributed.gather_texts(text, device))
        return []

    if not examiner.run(
        "processes",
        together,
        seconds=timeout.total_seconds(),
        advice="a process died or the network between the machines stalls; look at the others' output",
    ):
        return None
    return merged([[Finding(**values) for values in json.loads(text)] for text in gathered])


class _Examiner:
    """Runs checks with a time limit each, and collects their findings."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.device: torch.device | None = None  # device of this rank, when it is known
        self.findings: list[Finding] = []
        self.hangs = False

    def run(
        self, check: str, examine: Callable[[], list[Finding]], seconds: float | None = None, advice: str = ""
    ) -> bool:
        """Run a check. A failure or timeout is recorded as a problem.

        Returns:
            Whether it ended in time.
        """
        seconds = seconds or self._seconds
        findings: list[Finding] = []
        errors: list[Exception] = []

        def target() -> None:
            try:
                if self.device is not None:
                    work_on(self.device)
                findings.extend(examine())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=target, name=check, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self.hangs = True
            findings = [
                Finding(
                    check,
                    f"no answer in {seconds:.0f} s",
                    "problem",
                    advice or "see whether the disk or the device behind it hangs",
                )
            ]
        elif errors:
            text = str(errors[0]) if isinstance(errors[0], UserError) else f"{type(errors[0]).__name__}: {errors[0]}"
            findings = [Finding(check, text.splitlines()[0], "problem", advice or "fix this")]
        self.findings += findings
        return not errors and not thread.is_alive()


def merged(ranks: list[list[Finding]]) -> list[Finding]:
    """Merge the findings of all ranks to one per check, naming the rank: all problems, else the worst verdict, of equal
    ones the lowest measure.
    """
    result = []
    checks = dict.fromkeys(finding.check for findings in ranks for finding in findings)
    for check in checks:
        own = [(rank, finding) for rank, findings in enumerate(ranks) for finding in findings if finding.check == check]
        rank, worst = max(own, key=lambda one: (_VERDICTS.index(one[1].verdict), -one[1].measure))
        texts = {finding.found for _, finding in own}
        if len(texts) == 1:
            result.append(worst)
        elif worst.verdict == "problem":
            problems = [(rank, finding.found) for rank, finding in own if finding.verdict == "problem"]
            result.append(replace(worst, found="; ".join(f"rank {rank}: {found}" for rank, found in problems)))
        elif worst.uniform and worst.verdict == "ok":
            other, different = next(one for one in own if one[1].found != worst.found)
            result.append(
                Finding(
                    check,
                    f"rank {rank}: {worst.found}; rank {other}: {different.found}",
                    "problem",
                    "expected the same on all machines; install the same environment, or give all of "
                    "them the same folder",
                )
            )
        else:
            result.append(Finding(check, f"rank {rank}: {worst.found}", worst.verdict, worst.advice))
    return result


def _print(console: Console, findings: list[Finding]) -> None:
    console.table(
        "cloze doctor",
        ("check", "found", "verdict"),
        [(finding.check, finding.found, finding.verdict) for finding in findings],
    )
    for finding in findings:
        if finding.advice:
            console.say(f"{finding.verdict}: {finding.check}: {finding.advice}")
