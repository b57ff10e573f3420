"""What a machine with a GPU shows and no other, in one run of at most 8 minutes, into one file.

    python benchmarks/gpu.py [--output gpu.json]

The tests that need a GPU, then the benchmark of a training step, each with its output; a part that runs out of its time
is ended and says so. The device's name and the libraries' versions stand beside them. Exit status 1 if a part failed.
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
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# name -> seconds, command: the file name stands for where its figures go
PARTS = {
    "tests": (290, ["-m", "pytest", "-q", "--durations=15", "tests/model/test_cuda.py"]),
    "training_step": (180, ["benchmarks/training_step.py", "--device", "cuda", "--rounds", "3", "--json", "FIGURES"]),
}


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


def device() -> dict:
    """Which device, driver and libraries the figures are of."""
    import deepspeed

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "deepspeed": deepspeed.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the file that is written")
    output = parser.parse_args().output
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: found no CUDA device, expected one", file=sys.stderr)
        return 2
    report: dict = {"device": device()}
    for name, (seconds, command) in PARTS.items():
        print(f"{name}: at most {seconds} s", flush=True)
        report[name] = run_command(seconds, command)
        output.write_text(json.dumps(report, indent=1) + "\n")  # after each part: a lost machine loses the last alone
        print(report[name]["output"], flush=True)
    return int(any(report[name]["status"] != 0 for name in PARTS))


if __name__ == "__main__":
    sys.exit(main())
