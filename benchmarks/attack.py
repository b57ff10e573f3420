"""Training, files and the server under attack: how much was survived, and what was lost.

    python benchmarks/attack.py [--quick] [--minutes N] [--seed N] [--json FILE]      # --kills, --files, ... N

- kills: a run of two processes gets SIGKILL and SIGTERM at random moments, in its saves too, has checkpoint files
  damaged and its disk filled; it must end with the weights and the curve of an undisturbed one, bit for bit;
- hostile files: a run, prepared data (crafted shards and manifests with right hashes too), a tokenizer, a corpus, a
  configuration and a model with a file damaged, exchanged or made to harm; the command must end with one line and
  status 2, or with the undisturbed result, bit for bit;
- disturbed: preparation, training and export whose disk is full or read-only from some moment on, or which are killed
  then; one line and status 2, and the undisturbed result when the same command is run again;
- states: checkpoints of four optimizers at ZeRO 0 to 2 whose tensors and values were changed, the hashes right, and
  resumed: a line, or the run's end;
- values: manifests, tokenizers, states of checkpoints, metadata of tables (values changed, the hashes right) and JSON
  lines, read in this process; a line, or what simple reference readers find;
- tables: fields of separators, quotes and line ends in CSV, TSV and JSON lines, read as they were written, and the same
  files damaged, read without a traceback;
- requests: what is wrong sent to a real `cloze serve`, each to be answered by the right status, then bursts of 100
  connections of each kind (silent, half, one-byte chunks, large answers, ...), then many that send half, read nothing
  or leave, while an honest client asks and must be answered 200.

What the slow tests do, in larger numbers: tests/distributed/chaos.py, tests/hostile_files.py, tests/full_disk.py,
tests/hostile_states.py, tests/hostile_values.py, tests/hostile_tables.py and tests/launch/serve/hostile_requests.py.
Whatever ended otherwise is lost: it is printed with the seed that repeats it, and the exit status is 1. --quick takes
some 10 minutes on two quiet cores; without it some 70, and the states (not timed). It is done in parts: runs that are
killed 15 times, 40 files, all requests; with --minutes in parts of a few of each kind in turn, until the time is used.
FILE has the figures of each part as soon as it has ended, and the same command with the same FILE and seed goes on
behind the parts that stand there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# As for the tests: DeepSpeed reads the first when it is imported, and tiny models are slower with a second thread.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from synthetic_batches import hardware, own_command

from tests import full_disk, hostile_files, hostile_states, hostile_tables, hostile_values
from tests.distributed import chaos
from tests.launch.serve import hostile_requests
from tests.launch.serve.serving import server
from tests.launch.tiny_models import save_model

SIZES = {  # whole, quick
    "kills": (105, 12),
    "files": (280, 36),
    "disturbed": (280, 36),
    "states": (160, 20),
    "values": (40_000, 2000),
    "tables": (60_000, 6000),
    "requests": (7000, 400),
    "connections": (3000, 600),
}
# Of one run, and of one set of folders that are attacked: each part draws anew, its ZeRO stage too.
KILLS_A_PART, FILES_A_PART, STATES_A_PART, VALUES_A_PART, TABLES_A_PART = 15, 40, 40, 10_000, 20_000
# Of a part of each kind with --minutes.
SMALL = {
    "kills": 8,
    "files": 14,
    "disturbed": 14,
    "states": 12,
    "values": 1000,
    "tables": 3000,
    "requests": 150,
    "connections": 200,
}
SIEGE_SECONDS = 4  # of bursts of each kind
MOST_BYTES = 2 << 30  # that the server may take beside the model for hostile connections


def say(line: str) -> None:
    print(line, flush=True)


def kill(folder: Path, count: int, seed: int) -> dict:
    """Kills by their moment; what was lost."""
    try:
        struck = chaos.endure(folder, seed, count, seconds=60 * count, say=say)
    except (AssertionError, subprocess.TimeoutExpired) as error:  # the latter of a run that hangs
        return {"kills": 0, "lost": [f"the run: {error}"]}
    return {"kills": struck.total(), "by moment": dict(struck), "lost": []}


def harm(folder: Path, count: int, seed: int) -> dict:
    """Hostile files by target and by the status that they led to; what was lost."""
    return outcomes(hostile_files.attacks(folder, count, seed), "files")


def disturb(folder: Path, count: int, seed: int) -> dict:
    """Full disks and kills by target and by the status that they led to; what was lost."""
    return outcomes(full_disk.starvations(folder, count, seed), "disturbed")


def outcomes(found: Iterator[hostile_files.Outcome], name: str) -> dict:
    """What came of commands, counted."""
    by_target, statuses, lost = Counter(), Counter(), []
    for outcome in found:
        by_target[outcome.target] += 1
        statuses[str(outcome.status)] += 1
        if outcome.lost:
            lost.append(f"{outcome.target}, {outcome.what}: {outcome.lost}")
            say(f"LOST {lost[-1]}\n{outcome.output[-2000:]}")
    return {name: by_target.total(), "by target": dict(by_target), "by status": dict(statuses), "lost": lost}


def read(folder: Path, count: int, seed: int) -> dict:
    """Tables by format; what was lost."""
    return readings(hostile_tables.readings(folder, count, seed), "tables")


def craft(folder: Path, count: int, seed: int) -> dict:
    """Resumes of crafted checkpoints by optimizer; what was lost."""
    return readings(hostile_states.attacks(folder, count, seed), "states")


def change(folder: Path, count: int, seed: int) -> dict:
    """Files with changed values by kind; what was lost."""
    return readings(hostile_values.readings(folder, count, seed), "values")


def readings(found: Iterator[tuple[str, str | None]], name: str) -> dict:
    """What came of readings and resumes, counted."""
    kinds, lost = Counter(), []
    for kind, wrong in found:
        kinds[kind] += 1
        lost += [f"{kind}: {wrong}"] if wrong else []
    return {name: kinds.total(), "by kind": dict(kinds), "lost": lost}


def ask(folder: Path, count: int, connections: int, seed: int) -> dict:
    """Requests and connections, the slowest honest answer, the memory that the server took; what was lost."""
    lost, asked, slowest, besieged = [], 0, 0.0, {}
    with (
        hostile_requests.many_files(connections + 1000),
        server(save_model(folder), fresh=True) as (address, process),
        ExitStack() as stack,
    ):
        for what, wrong in hostile_requests.ask_badly(address, count, seed):
            asked += 1
            lost += [f"{what}: {wrong}"] if wrong else []
        before = hostile_requests.peak_of(process.pid)
        for kind, content in hostile_requests.SIEGES.items():
            found = list(hostile_requests.besiege(address, content, SIEGE_SECONDS))
            asked += len(found)
            besieged[f"slowest honest answer among {kind}, seconds"] = max(seconds for _, seconds in found)
            lost += [f"an honest request among {kind}: status {status}" for status, _ in found if status != 200]
        for status, seconds in hostile_requests.flood(address, connections, 50, stack):
            asked, slowest = asked + 1, max(slowest, seconds)
            lost += [f"an honest request among hostile connections: status {status}"] if status != 200 else []
        grown = hostile_requests.peak_of(process.pid) - before
        lost += [f"memory: it grew by {grown >> 20} MiB"] if grown > MOST_BYTES else []
        process.terminate()
        _, errors = process.communicate(timeout=120)
        if process.returncode not in (0, 1) or "Traceback" in errors:  # 1: answers that were not read were dropped
            lost.append(f"the server: status {process.returncode}\n{errors[-2000:]}")
    return {
        "requests": asked,
        "connections": connections,
        **besieged,
        "slowest honest answer among all connections, seconds": slowest,
        "memory grown, MiB": grown / 2**20,
        "lost": lost,
    }


@dataclass(frozen=True)
class Part:
    """A part of the attacks, with a seed of its own: what is attacked, and how often."""

    name: str
    """training, files, disks, tables or serving, and which part of it."""
    attack: Callable[..., dict]
    numbers: tuple[int, ...]
    seed: int

    @property
    def kind(self) -> str:
        return self.name.split()[0]


def divide(sizes: dict[str, int], seed: int) -> list[Part]:
    """All that is to be done, in parts."""
    parts = []
    for kind, attack, count, most in (
        ("training", kill, sizes["kills"], KILLS_A_PART),
        ("files", harm, sizes["files"], FILES_A_PART),
        ("disks", disturb, sizes["disturbed"], FILES_A_PART),
        ("states", craft, sizes["states"], STATES_A_PART),
        ("values", change, sizes["values"], VALUES_A_PART),
        ("tables", read, sizes["tables"], TABLES_A_PART),
    ):
        for number, first in enumerate(range(0, count, most)):
            parts.append(Part(f"{kind} {number + 1}", attack, (min(most, count - first),), seed + number))
    if sizes["requests"]:
        parts.append(Part("serving 1", ask, (sizes["requests"], sizes["connections"]), seed))
    return parts


def in_turn(sizes: dict[str, int], seed: int, minutes: float) -> Iterator[Part]:
    """Small parts of each kind in turn, until the time is used."""
    until = time.monotonic() + 60 * minutes
    for number in itertools.count():
        for part in divide(sizes, seed + number):
            if time.monotonic() > until:
                return
            yield replace(part, name=f"{part.kind} {number + 1}")


def ends(lost: list[str]) -> str:
    """How many of what was lost were tracebacks, hangs and crashes."""
    of = {
        "tracebacks": ("traceback", "Traceback"),
        "hangs": ("still there", "no answer", "steps in"),
        "crashes": ("status -", "status 13"),  # by a signal, as Python and as a shell has it: 134 to 139
    }
    return ", ".join(
        f"{name} {sum(any(sign in each for sign in signs) for each in lost)}" for name, signs in of.items()
    )


def total(parts: dict[str, dict], kind: str) -> dict:
    """The figures of a kind's parts together: counts are added, of seconds and bytes the most counts."""
    found: dict = {}
    for figures in (each for name, each in parts.items() if name.split()[0] == kind):
        for name, value in figures.items():
            if isinstance(value, dict):
                found[name] = dict(Counter(found.get(name, {})) + Counter(value))
            elif isinstance(value, float) and name != "seconds":
                found[name] = max(found.get(name, 0.0), value)
            else:
                found[name] = found.get(name, type(value)()) + value
    return found


def begun(path: Path | None, seed: int, sizes: dict[str, int]) -> dict[str, dict]:
    """The parts that an earlier start with the same seed and sizes has left in a file."""
    if path is None or not path.exists():
        return {}
    figures = json.loads(path.read_text())
    if (figures["seed"], figures["sizes"]) != (seed, sizes):
        sys.exit(
            f"{path}: found figures of seed {figures['seed']} and {figures['sizes']}, expected seed {seed} and "
            f"{sizes}; name another file"
        )
    return figures["parts"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of each")
    parser.add_argument("--minutes", type=float, help="kinds in turn, in small parts, for so long")
    parser.add_argument("--seed", type=int, help="of all that is drawn; default: a new one")
    parser.add_argument("--json", type=Path, help="file for the figures; parts that stand there are not repeated")
    for name, (whole, quick) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"so many (default {whole}, quick {quick}); 0: none")
    options = parser.parse_args()
    sizes = {
        name: (SMALL[name] if options.minutes else both[options.quick])
        if getattr(options, name) is None
        else getattr(options, name)
        for name, both in SIZES.items()
    }
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    say(f"{own_command('torch', 'deepspeed', 'pyarrow', 'uvicorn')}\n{hardware('cpu')}, seed {seed}")
    figures: dict = {
        "seed": seed,
        "sizes": sizes,
        "hardware": hardware("cpu"),
        "parts": begun(options.json, seed, sizes),
    }
    for part in in_turn(sizes, seed, options.minutes) if options.minutes else divide(sizes, seed):
        if part.name not in figures["parts"]:
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                figures["parts"][part.name] = part.attack(Path(folder), *part.numbers, part.seed)
            figures["parts"][part.name]["seconds"] = time.perf_counter() - start
        say(f"{part.name}, seed {part.seed}: {json.dumps(figures['parts'][part.name])}")
        done = figures["parts"].values()
        figures |= {
            part.kind: total(figures["parts"], part.kind),
            "lost": sum(len(each["lost"]) for each in done),
            "seconds": sum(each["seconds"] for each in done),
        }
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    lost = [each for part in figures["parts"].values() for each in part["lost"]]
    say("\n".join(f"LOST {each}" for each in lost))
    for what, part, name in (
        ("kills", "training", "kills"),
        ("hostile files", "files", "files"),
        ("full disks and kills", "disks", "disturbed"),
        ("crafted checkpoints", "states", "states"),
        ("changed values", "values", "values"),
        ("tables", "tables", "tables"),
        ("requests", "serving", "requests"),
    ):
        if found := figures.get(part):
            say(f"{what} {found.get(name, 0)}, lost {len(found['lost'])}, {ends(found['lost'])}")
        else:
            say(f"{what}: none was made")
    say(f"lost {len(lost)}; seed {seed}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
