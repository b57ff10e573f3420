"""Memory of this process and of its machine, in bytes, as the operating system reports it."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

GIB = 2**30
# Files of control groups, by the controller in /proc/self/cgroup (version 2 has none): limit, usage, and the part of
# the usage that is page cache, which the kernel frees first.
_GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def peak_bytes(root: Path = Path("/")) -> int:
    """Peak memory of this process."""
    # Not getrusage: on Linux its value is inherited from the process that started this one (execve(2)).
    known = [_kibibytes(root / "proc/self/status", name) for name in ("VmHWM", "VmRSS")]  # the first may lag behind
    sizes = [size for size in known if size is not None]
    if len(sizes) == len(known):
        return max(sizes)
    # In KiB, but on macOS in bytes (getrusage(2)).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Resident memory of this process; None where the system does not report it."""
    return _kibibytes(root / "proc/self/status", "VmRSS")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can still allocate: what is free on the machine, or what its control groups allow.

    None where the system does not report it.
    """
    free = _kibibytes(root / "proc/meminfo", "MemAvailable")
    return None if free is None else min([free, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process leaves it."""
    for controllers, folder in group_folders(root):
        for controller in _GROUPS.keys() & controllers:
            limit, use, files = _GROUPS[controller]
            if (folder / limit).is_file() and (text := (folder / limit).read_text().strip()) != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield int(text) - int((folder / use).read_text()) + int(stat[files])


def group_folders(root: Path) -> Iterator[tuple[list[str], Path]]:
    """The folder of each control group around this process, its own and all parents, with the controllers that it is
    for; version 2 has one tree for all, whose only name is empty.
    """
    known = root / "proc/self/cgroup"
    for line in known.read_text().splitlines() if known.is_file() else ():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup" / controllers
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            yield controllers.split(","), folder
            if folder == mount:
                break


def _kibibytes(path: Path, name: str) -> int | None:
    """Bytes of the line `name: N kB` in a file under /proc; None if there is no such line."""
    lines = path.read_text().splitlines() if path.is_file() else ()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
