"""`pip install` that says what it is at and how far, and what pip printed only if it failed: used by `make env`.

python .ci/install.py --constraint constraints.txt --editable '.[test]'
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

SECONDS_A_LINE = 15  # where no line can be written over
LINES_A_REPETITION = 4  # as long as nothing has changed
PACKAGES = Path(sysconfig.get_path("purelib"))
_TOLD = ("Collecting", "Downloading", "Building", "Installing", "Using cached")  # first words of pip's lines
_LAST_STAGE = "Installing collected packages: "  # all of them in one line, minutes before the next


def main(arguments: list[str]) -> int:
    """Run pip; returns its status."""
    print(f"installing into {sys.prefix}: some minutes, most of them for PyTorch", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="pip-") as scratch,
        subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": scratch},
        ) as pip,
    ):
        printed: list[str] = []
        reader = threading.Thread(target=lambda: printed.extend(iter(pip.stdout.readline, "")))
        reader.start()
        _tell(reader, printed, Path(scratch))
    if pip.returncode:
        print("".join(printed), end="", file=sys.stderr)
    else:
        print(f"installed in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return pip.returncode


def _tell(reader: threading.Thread, printed: list[str], scratch: Path) -> None:
    """Say how far pip is until it has ended: on a terminal in one line, elsewhere a line now and then."""
    terminal = sys.stderr.isatty()
    began, clock, said, last, same = time.time(), time.monotonic(), 0.0, "", 0
    while reader.is_alive():
        reader.join(timeout=1 if terminal else min(1, SECONDS_A_LINE))
        passed = time.monotonic() - clock
        if terminal:
            print(f"\r\033[K{passed:4.0f} s  {_stage(printed, scratch, began)}", end="", file=sys.stderr, flush=True)
        elif passed - said >= SECONDS_A_LINE:
            said, stage = passed, _stage(printed, scratch, began)
            same = same + 1 if stage == last else 0
            if same % LINES_A_REPETITION == 0:
                print(f"{passed:4.0f} s  {stage}", file=sys.stderr, flush=True)
            last = stage
    if terminal:
        print("\r\033[K", end="", file=sys.stderr)


def _stage(printed: list[str], scratch: Path, began: float) -> str:
    """What pip is at: its last line that tells it and the megabytes in its scratch, or how many packages it has put in
    place since `began`, in seconds since the epoch."""
    line = next((line.strip() for line in reversed(printed) if line.strip().startswith(_TOLD)), "Starting")
    if line.startswith(_LAST_STAGE):
        count = len(line.removeprefix(_LAST_STAGE).split(", "))
        done = sum(_number(path, "st_mtime") >= began for path in PACKAGES.glob("*.dist-info"))
        return f"Installing packages: {min(done, count)} of {count}"
    # os.walk passes over folders that pip removes meanwhile.
    files = (Path(folder, name) for folder, _, names in os.walk(scratch) for name in names)
    megabytes = sum(_number(path, "st_size") for path in files) / 1e6
    return f"{line[:100]}" + (f", {megabytes:,.0f} MB fetched and unpacked" if megabytes >= 1 else "")


def _number(path: Path, name: str) -> float:
    with suppress(OSError):  # removed meanwhile
        return getattr(path.stat(), name)
    return 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
