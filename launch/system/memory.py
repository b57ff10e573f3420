"""Memory of this process and of its machine, in bytes, as the operating system reports it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

# Control groups by the controller that /proc/self/cgroup names (version 2 has none): limit, use, and what of the use is
# files read or written, which the kernel gives up first.
_GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def peak_bytes(root: Path = Path("/")) -> int:
    """The most that this process has held."""
    # Not getrusage: on Linux its figure begins with that of the process that started this one (execve(2)).
    known = [_kibibytes(root / "proc/self/status", name) for name in ("VmHWM", "VmRSS")]  # the first may lag behind
    found = [size for size in known if size is not None]
    if len(found) == len(known):
        return max(found)
    # In KiB, but on macOS in bytes (getrusage(2)).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes(root: Path = Path("/")) -> int | None:
    """What this process holds; None where the system does not tell."""
    return _kibibytes(root / "proc/self/status", "VmRSS")


def available_bytes(root: Path = Path("/")) -> int | None:
    """What this process can still get: what the machine has free, or less, if its control groups leave less.

    None where the system does not tell.
    """
    free = _kibibytes(root / "proc/meminfo", "MemAvailable")
    return None if free is None else min([free, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group that holds this process leaves it: its own, and all around it."""
    known = root / "proc/self/cgroup"
    for line in known.read_text().splitlines() if known.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in _GROUPS:
            continue
        limit, use, files = _GROUPS[controllers]
        mount = root / "sys/fs/cgroup" / controllers
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if (folder / limit).is_file() and (text := (folder / limit).read_text().strip()) != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield int(text) - int((folder / use).read_text()) + int(stat[files])
            if folder == mount:
                break


def _kibibytes(path: Path, name: str) -> int | None:
    """Bytes of a line `name: N kB` of a file under /proc; None without it."""
    lines = path.read_text().splitlines() if path.is_file() else ()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
