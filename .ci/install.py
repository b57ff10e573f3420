"""`pip install` that says what it is at and for how long, and what pip printed only if it failed: used by `make env`.

    python .ci/install.py --constraint constraints.txt --editable '.[test]'
"""

import subprocess
import sys
import threading
import time

SECONDS_A_LINE = 15  # where no line can be written over
_TOLD = ("Collecting", "Downloading", "Building", "Installing", "Using cached")  # first words of pip's lines


def main(arguments: list[str]) -> int:
    """Run pip; returns its status."""
    terminal = sys.stderr.isatty()
    print(f"installing into {sys.prefix}: some minutes, most of them for PyTorch", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    began, said = time.monotonic(), 0.0
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace") as pip:
        printed: list[str] = []
        reader = threading.Thread(target=lambda: printed.extend(iter(pip.stdout.readline, "")))
        reader.start()
        while reader.is_alive():
            reader.join(timeout=1 if terminal else min(1, SECONDS_A_LINE))
            passed = time.monotonic() - began
            at = next((line.strip() for line in reversed(printed) if line.strip().startswith(_TOLD)), "Starting")
            if terminal:
                print(f"\r\033[K{passed:4.0f} s  {at[:100]}", end="", file=sys.stderr, flush=True)
            elif passed - said >= SECONDS_A_LINE:
                print(f"{passed:4.0f} s  {at[:100]}", file=sys.stderr, flush=True)
                said = passed
    if terminal:
        print("\r\033[K", end="", file=sys.stderr)
    if pip.returncode:
        print("".join(printed), end="", file=sys.stderr)
    else:
        print(f"installed in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
