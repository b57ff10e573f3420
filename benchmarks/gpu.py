"""The first hour on a GPU: tests, speed, plans against measurements, and each claim that waits for one as pass or fail.

    make gpu                                            # 45 minutes, into runs/gpu; the same command continues
    python benchmarks/gpu.py --quick --output runs/gpu  # 8 minutes
    python benchmarks/gpu.py --rehearse --output DIR    # without a GPU: every part at a size for a CPU; claims nothing

Each part is a process of its own with a time limit; one that fails, or hangs, is named with what it printed last, and
the others go on. Written after each part, to --output: report.md with the device, the parts, the claims and pictures,
report.json with the figures, and what each part printed. Parts that were completed on this device at this commit are
not repeated. With several GPUs some parts use all of them. Exit status 1: a part failed, was left out for lack of time,
or a claim did not hold; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
MINUTES, QUICK_MINUTES = 45, 8
SHOWN_LINES = 12  # of what a failed part printed
_REHEARSAL_TIMES = 5  # a part's seconds, which are a GPU's: a CPU beside other work took longer


@dataclass(frozen=True)
class Part:
    """Something to run.

    Args:
        question: what it answers.
        command: behind `python`; FIGURES stands for the JSON file of its figures, {folder} for its own folder, {gpus}
            for the number of GPUs.
        seconds: the most that it may take.
        quick: the same in a run of 8 minutes; None: left out there.
        quick_command: its command there, where it is another.
        rehearsal: its command on a CPU.
        gpus: the least number of GPUs that it needs.
    """

    question: str
    command: tuple[str, ...]
    seconds: int
    quick: int | None = None
    quick_command: tuple[str, ...] | None = None
    rehearsal: tuple[str, ...] | None = None
    gpus: int = 1


# Four at a time: most of their minutes go to starts and compilers, which leave a GPU idle.
TESTS = ("-m", "pytest", "-q", "-n", "4", "-p", "no:cacheprovider", "--junitxml", "{folder}/tests.xml")
TESTS = (*TESTS, "tests/model/test_cuda.py")
STEP = ("benchmarks/training_step.py", "--json", "FIGURES")
TUNING = ("benchmarks/finetuning.py", "--quick", "--json", "FIGURES")
QKV = ("benchmarks/qkv_gradients.py", "--json", "FIGURES")
PLANNED = "benchmarks/planned_and_measured.py"
SHAPES = ("base@128", "large@512", "large@128", "base@512", "distil-base@128", "modern@1024")
"""Of planned_and_measured.py; what counts most comes first."""

PARTS = {
    "doctor": Part(
        "Is the machine fit, and what are its rates?",
        ("-m", "cloze", "doctor"),
        90,
        quick=60,
        rehearsal=("-m", "cloze", "doctor"),
    ),
    "tests": Part(
        "Every test that needs a GPU: kernels, waits, NaN, a killed run, two ranks",
        (*TESTS, "-m", "slow or not slow"),
        600,
        quick=200,
        quick_command=TESTS,
        rehearsal=TESTS,
    ),
    "step": Part(
        "A step of ours and of transformers on the same batches, compiled and not",
        (*STEP, "--device", "cuda", "--rounds", "5"),
        485,
        quick=120,
        quick_command=(*STEP, "--device", "cuda", "--quick"),
        rehearsal=(*STEP, "--device", "cpu", "--quick", "--rounds", "1"),
    ),
    "qkv gradients": Part(
        "Which form of `train.qkv_gradients` is faster?",
        (*QKV, "--device", "cuda"),
        40,
        rehearsal=(*QKV, "--device", "cpu"),
    ),
    **{
        f"plan {shape}": Part(
            f"A step of {shape} as planned and as measured",
            (PLANNED, shape, "--json", "FIGURES"),
            165,
            quick=100 if shape == "base@128" else None,
            quick_command=(PLANNED, shape, "--steps", "20", "--json", "FIGURES"),
            rehearsal=(PLANNED, "tiny@64", "--steps", "8", "--json", "FIGURES") if shape == "base@128" else None,
        )
        for shape in SHAPES
    },
    "fine-tuning": Part(
        "A step of fine-tuning beside Trainer's",
        (*TUNING, "--device", "cuda"),
        240,
        rehearsal=(*TUNING, "--device", "cpu"),
    ),
    "all GPUs": Part(
        "What an all-reduce takes",
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{gpus}", "-m", "cloze", "doctor"),
        90,
        gpus=2,
    ),
    "plan base@128 on all GPUs": Part(
        "A step of base@128 on every GPU of the machine as planned and as measured",
        (PLANNED, "base@128", "--processes", "{gpus}", "--json", "FIGURES"),
        165,
        gpus=2,
    ),
}


@dataclass
class Found:
    """What came of a part.

    Args:
        status: of its process; None: out of time.
        tests: outcome of each test function: passed, failed or skipped.
    """

    command: str
    status: int | None
    seconds: float
    output: str
    figures: dict
    tests: dict[str, str] = field(default_factory=dict)
    of: dict = field(default_factory=dict)
    """Device, libraries and commit that it is of."""


Results = Mapping[str, Found]


@dataclass(frozen=True)
class Claim:
    """Something that the docs say of GPUs and that no GPU has shown.

    Args:
        text: in one line.
        page: where it stands.
        bound: what is to be found.
        find: what was found, and whether it is within the bound; None: not measured.
    """

    text: str
    page: str
    bound: str
    find: Callable[[Results], tuple[str, bool] | None]


def tested(text: str, page: str, *names: str) -> Claim:
    """A claim that holds if these tests pass."""

    def find(results: Results) -> tuple[str, bool] | None:
        outcomes = results["tests"].tests if "tests" in results else {}
        found = [outcomes.get(name, "skipped") for name in names]
        if "failed" in found:
            return "failed", False
        return None if "skipped" in found else ("passed", True)

    return Claim(text, page, " and ".join(f"`{name}`" for name in names), find)


def measured(
    text: str, page: str, part: str, figure: str, least: float = 0.0, most: float = float("inf"), card: str = ""
) -> Claim:
    """A claim that holds if a figure lies within bounds.

    Args:
        figure: name, or names from the outside in with / between them.
        card: what the device's name must contain for the claim to be about it.
    """

    def find(results: Results) -> tuple[str, bool] | None:
        if part not in results or results[part].status != 0 or card not in results[part].of.get("device", ""):
            return None
        value: object = results[part].figures
        for name in figure.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        return (f"{value:.3g}", least <= value <= most) if isinstance(value, (int, float)) else None

    bound = f"{least:g} to {most:g}" if most < float("inf") else f"at least {least:g}"
    return Claim(text, page, f"{figure.rpartition('/')[2]} of {part}: {bound}" + (f", on {card}" if card else ""), find)


# The share of an estimate by which a plan may be wrong: that of the published rates it is held to (docs/scaling.md).
PLAN_ERROR = 0.2
CLAIMS = (
    tested("Kernels agree with fp32 on the host", "model.md", "test_kernels_agree_with_fp32_on_the_host"),
    tested(
        "A step at `zero.stage: 0` does not wait for the device",
        "training.md",
        "test_a_step_never_waits_for_the_device",
        "test_no_host_waits_in_a_whole_step_nor_is_memory_asked_for_twice",
    ),
    tested("A step of NaN is skipped on the device", "training.md", "test_a_step_of_nan_is_skipped_on_the_device"),
    tested(
        "A killed run goes on bit for bit with `train.deterministic`",
        "training.md",
        "test_a_killed_run_goes_on_bit_for_bit_when_it_is_deterministic",
    ),
    tested(
        "Compiled and recomputed layers have near gradients, and the same dropout",
        "training.md",
        "test_compiled_and_recomputed_layers_leave_gradients_near",
        "test_dropout_is_the_same_when_recomputed_and_when_compiled",
    ),
    tested(
        "Weights cast once a step change nothing",
        "training.md",
        "test_weight_copies_change_nothing_and_are_as_new_as_the_weights",
    ),
    tested("Two ranks on NCCL train as one", "training.md", "test_two_ranks_on_nccl_train_as_one"),
    measured(
        "A step is no slower than transformers' at its best, BERT-base of 128",
        "performance.md",
        "step",
        "ratio_to_transformers_best_128_cuda",
        least=1.0,
    ),
    measured(
        "A step is no slower than transformers' at its best, ModernBERT-base of 1,024",
        "performance.md",
        "step",
        "ratios_to_transformers_best/ModernBERT-base, 1024, cuda",
        least=1.0,
    ),
    measured(
        "A step of fine-tuning is no slower than Trainer's at its best",
        "performance.md",
        "fine-tuning",
        "ratio_to_transformers_best",
        least=1.0,
    ),
    *(
        measured(
            f"`cloze plan` is right about {what} of {shape}",
            "scaling.md",
            f"plan {shape}",
            figure,
            1 - PLAN_ERROR,
            1 + PLAN_ERROR,
        )
        for shape in SHAPES
        for what, figure in (("the time", "seconds_over_plan"), ("the memory", "bytes_over_plan"))
    ),
    # by docs/scaling.md, "What one H100 makes of the recipes", within the plan's error
    *(
        measured(
            f"MFU of {shape} is {mfu:.0%}", "scaling.md", f"plan {shape}", "mfu", mfu * (1 - PLAN_ERROR), card="H100"
        )
        for shape, mfu in (("large@512", 0.473), ("large@128", 0.502), ("base@128", 0.370))
    ),
    measured(
        "Products for each part of qkv are no slower than joined ones",
        "performance.md",
        "qkv gradients",
        "large/joined_over_parts",
        least=1.0,
    ),
    measured(
        "`cloze plan` is right about the time of base@128 on all GPUs of a machine",
        "scaling.md",
        "plan base@128 on all GPUs",
        "seconds_over_plan",
        1 - PLAN_ERROR,
        1 + PLAN_ERROR,
    ),
)


def run_command(seconds: float, command: list[str]) -> dict:
    """Run one part; its status (None: out of time), its seconds, what it printed and the figures that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        began = time.perf_counter()
        arguments = [str(figures) if each == "FIGURES" else each for each in command]
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            output, status = process.communicate()[0], None
        return {
            "command": " ".join(command),
            "status": status,
            "seconds": time.perf_counter() - began,
            "output": output,
            "figures": json.loads(figures.read_text()) if figures.exists() else {},
        }


def about(rehearse: bool) -> dict:
    """Which device, driver, libraries and commit the figures are of."""
    import deepspeed

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = {"commit": commit or "unknown", "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    if rehearse:
        return {"device": "a rehearsal on the CPU", "count": 0} | found
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    } | found


def outcomes(path: Path) -> dict[str, str]:
    """The worst outcome of each test function in a file of pytest's, over its parameters."""
    worst: dict[str, str] = {}
    order = ("passed", "skipped", "failed")
    for case in ElementTree.parse(path).iter("testcase") if path.exists() else ():
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = case.attrib["name"].partition("[")[0]
        worst[name] = max(worst.get(name, "passed"), outcome, key=order.index)
    return worst


def wanted(arguments: argparse.Namespace, gpus: int) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Name, seconds and command of each part of this run, with its places filled."""
    for name, seconds, command in _chosen(arguments, gpus):
        places = {"{folder}": str(folder_of(name, arguments.output.resolve())), "{gpus}": str(gpus)}
        for place, found in places.items():
            command = tuple(word.replace(place, found) for word in command)
        yield name, seconds, command


def folder_of(name: str, output: Path) -> Path:
    """The folder of a part."""
    return output / name.replace(" ", "-")


def _chosen(arguments: argparse.Namespace, gpus: int) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    for name, part in PARTS.items():
        if arguments.only and name not in arguments.only:
            continue
        if arguments.rehearse:
            if part.rehearsal:
                yield name, _REHEARSAL_TIMES * part.seconds, part.rehearsal
        elif gpus >= part.gpus and not arguments.quick:
            yield name, part.seconds, part.command
        elif gpus >= part.gpus and part.quick:
            yield name, part.quick, part.quick_command or part.command


def run_part(name: str, seconds: float, command: tuple[str, ...], output: Path, of: dict) -> Found:
    """Run a part; its own folder and what it printed lie in `output`."""
    folder = folder_of(name, output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tests.xml").unlink(missing_ok=True)
    done = run_command(seconds, list(command))
    (folder / "output.txt").write_text(done["output"])
    return Found(**done, tests=outcomes(folder / "tests.xml"), of=of)


def kept(output: Path, of: dict) -> dict[str, Found]:
    """The parts of an earlier run that were completed on this device at this commit."""
    path = output / "report.json"
    parts = json.loads(path.read_text())["parts"] if path.is_file() else {}
    found = {name: Found(**fields) for name, fields in parts.items()}
    return {name: each for name, each in found.items() if each.status == 0 and each.of == of}


def judged(results: Results, of: dict) -> list[tuple[Claim, str, str]]:
    """Each claim, what was found, and pass, fail or `not measured`, as all are of a rehearsal."""
    rows = []
    for claim in CLAIMS:
        found = claim.find(results) if of["count"] else None
        rows.append((claim, *(("", "not measured") if found is None else (found[0], "pass" if found[1] else "FAIL"))))
    return rows


def write(output: Path, of: dict, results: Results, left: list[str]) -> None:
    """Write report.json, report.md and its pictures."""
    rows = judged(results, of)
    content = {
        "of": of,
        "parts": {name: asdict(found) for name, found in results.items()},
        "claims": [{"claim": claim.text, "bound": claim.bound, "found": f, "end": end} for claim, f, end in rows],
        "not run": left,
    }
    (output / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["# The first hour on a GPU", "", *(f"- {name}: {value}" for name, value in of.items()), ""]
    lines += ["| part | question | end | seconds |", "|---|---|---|---|"]
    for name, found in results.items():
        lines.append(f"| {name} | {PARTS[name].question} | {ending(found)} | {found.seconds:.0f} |")
    lines += [f"| {name} | {PARTS[name].question} | not run | |" for name in left]
    lines += ["", "| claim | page | bound | found | |", "|---|---|---|---|---|"]
    lines += [f"| {each.text} | {each.page} | {each.bound} | {found} | {end} |" for each, found, end in rows]
    for name in draw(output, results):
        lines += ["", f"![{name}]({name})"]
    for name, found in results.items():
        if found.status != 0:
            shown = found.output.strip().splitlines()[-SHOWN_LINES:]
            lines += ["", f"## {name}: {ending(found)}", "", f"    $ python {found.command}"]
            lines += [f"    {line}" for line in shown or ["(printed nothing)"]]
    (output / "report.md").write_text("\n".join(lines) + "\n")


def ending(found: Found) -> str:
    """How a part ended."""
    return "done" if found.status == 0 else "out of time" if found.status is None else f"status {found.status}"


def draw(output: Path, results: Results) -> list[str]:
    """The pictures of what there is; their file names."""
    from matplotlib.figure import Figure

    made = []
    plans = {name: each.figures for name, each in results.items() if "planned_step_seconds" in each.figures}
    if plans:
        figure = Figure(figsize=(8, 1 + 0.5 * len(plans)), layout="constrained")
        axes = figure.subplots()
        for shift, key, color in ((-0.2, "planned_mfu", "#b8c8d8"), (0.2, "mfu", "#4878a8")):
            places = [number + shift for number in range(len(plans))]
            bars = axes.barh(places, [100 * each[key] for each in plans.values()], 0.4, color=color)
            axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axes.set_yticks(range(len(plans)), [name.removeprefix("plan ") for name in plans])
        axes.invert_yaxis()
        axes.legend(["planned", "measured"])
        axes.set_xlabel("MFU in %")
        made.append("plans.png")
        figure.savefig(output / made[-1], dpi=120)
    rates = results["step"].figures.get("workloads", {}) if "step" in results else {}
    if rates:
        figure = Figure(figsize=(9, 1.2 + 1.6 * len(rates)), layout="constrained")
        for axes, (workload, by_name) in zip(
            figure.subplots(len(rates), squeeze=False)[:, 0], rates.items(), strict=True
        ):
            colors = ["#4878a8" if name.startswith("cloze") else "#b8b8b8" for name in by_name]
            bars = axes.barh(list(by_name), list(by_name.values()), color=colors)
            axes.bar_label(bars, [f"{value:,.0f}" for value in by_name.values()], padding=3, fontsize=8)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.tick_params(labelsize=8)
            axes.set_title(f"{workload}: real tokens a second", fontsize=9)
        made.append("step.png")
        figure.savefig(output / made[-1], dpi=120)
    return made


def table() -> str:
    """The claims as docs/scaling.md lists them."""
    lines = ["| claim | page | shown by |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {each.text} | [{each.page}]({each.page}) | {each.bound} |" for each in CLAIMS)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="the folder that is written")
    parser.add_argument("--quick", action="store_true", help=f"what counts most, in {QUICK_MINUTES} minutes")
    parser.add_argument("--rehearse", action="store_true", help="every part on the CPU, at a small size")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, help="parts are begun for so long, and ended after it")
    parser.add_argument("--claims", action="store_true", help="print the claims that wait for a GPU, and end")
    arguments = parser.parse_args()
    if arguments.claims:
        print(table())
        return 0
    if not (arguments.rehearse or torch.cuda.is_available()):
        print("benchmarks/gpu.py: found no CUDA device, expected one, or --rehearse", file=sys.stderr)
        return 2
    minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
    end = time.monotonic() + 60 * minutes
    output, of = arguments.output.resolve(), about(arguments.rehearse)
    output.mkdir(parents=True, exist_ok=True)
    results, left = kept(output, of), []
    for name, seconds, command in wanted(arguments, of["count"]):
        if name in results and results[name].command == " ".join(command):  # a quick one is not the whole
            print(f"{name}: done before", flush=True)
            continue
        seconds = min(seconds, end - time.monotonic())
        if seconds <= 0:
            left.append(name)
            continue
        print(f"{name}: at most {seconds:.0f} s", flush=True)
        results[name] = run_part(name, seconds, command, output, of)
        print(f"{name}: {ending(results[name])} after {results[name].seconds:.0f} s", flush=True)
        write(output, of, results, left)
    write(output, of, results, left)
    ends = [end for *_, end in judged(results, of)]
    print(
        f"{ends.count('pass')} claims hold, {ends.count('FAIL')} fail, {ends.count('not measured')} were not measured"
    )
    if left:
        print(f"no time was left for {', '.join(left)}: the same command continues")
    print(f"the report: {output / 'report.md'}")
    return int("FAIL" in ends or any(each.status != 0 for each in results.values()) or bool(left))


if __name__ == "__main__":
    sys.exit(main())
