"""Two hosts on one machine: network namespaces joined by a cable (veth), each with its own name and address."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HOSTS = {"host-a": "10.213.77.1", "host-b": "10.213.77.2"}


class Unavailable(Exception):
    """This machine has no such thing; the message says what is missing."""


def require(*programs: str) -> None:
    """Raise Unavailable unless we are root and every program is installed."""
    if os.geteuid() != 0:
        raise Unavailable("needs root")
    for program in programs:
        if not shutil.which(program):
            raise Unavailable(f"{program} is not installed")


def _namespace(host: str) -> str:
    return f"cloze-{os.getpid()}-{host}"


def on(host: str, folder: Path, *command: str) -> list[str]:
    """The command that runs on one of the hosts: with its name, its network and an /etc/hosts that knows both."""
    script = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
    # nsenter and not `ip netns exec`, which mounts another /sys, in which slurmd finds no cgroups.
    return [
        "nsenter",
        f"--net=/run/netns/{_namespace(host)}",
        "unshare",
        "--mount",
        "--uts",
        "--",
        "sh",
        "-c",
        script,
        str(folder / "hosts"),
        host,
        *command,
    ]


@contextmanager
def two_hosts(folder: Path) -> Iterator[None]:
    """Make the hosts of HOSTS, and take them away with every process on them.

    Raises:
        Unavailable: the machine lets us not.
    """
    require("ip", "nsenter", "unshare", "mount", "hostname")
    lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in HOSTS.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    cables = {host: f"cz{os.getpid()}{host[-1]}" for host in HOSTS}  # 15 characters at most
    left, right = HOSTS
    try:
        for host in HOSTS:
            _ip("netns", "add", _namespace(host))
        _ip(
            "link",
            "add",
            cables[left],
            "netns",
            _namespace(left),
            "type",
            "veth",
            "peer",
            "name",
            cables[right],
            "netns",
            _namespace(right),
        )
        for host, address in HOSTS.items():
            inside = ("-n", _namespace(host))
            _ip(*inside, "address", "add", f"{address}/24", "dev", cables[host])
            for device in ("lo", cables[host]):
                _ip(*inside, "link", "set", device, "up")
        if subprocess.run(on(left, folder, "true"), capture_output=True).returncode:
            raise Unavailable("a mount of its own is refused")
        yield
    finally:
        for host in HOSTS:
            found = subprocess.run(["ip", "netns", "pids", _namespace(host)], capture_output=True, text=True)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", _namespace(host)], capture_output=True)


def _ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise Unavailable(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
