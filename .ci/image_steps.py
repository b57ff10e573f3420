"""Take the Dockerfile's steps where no daemon runs: on this machine's own system, in a view of it that is thrown away.

    sudo python .ci/image_steps.py [--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu]

Instead of the base image there is this system beneath (Linux, root, 12 GB of disk, the network for pip): what is
written goes into an overlay on a disk image of its own. Files are copied as .dockerignore lets them into the context.
The exit status is that of the first step that fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IN_NAMESPACE = "--in-namespace"
# Of pip's own settings, which a build would be given as arguments or find in its base.
PASSED_ON = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "SSL_CERT_FILE", "HTTPS_PROXY")


def instructions() -> list[tuple[str, str]]:
    """Each with the words behind it, continued lines joined and comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        (name, words)
        for name, _, words in (
            line.partition(" ") for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()
        )
    ]


def in_context(path: str) -> bool:
    """Whether the build sees a file: the last pattern of .dockerignore that fits it, or a folder around it, decides."""
    seen = True
    around = ["/".join(path.split("/")[:count]) for count in range(1, path.count("/") + 2)]
    for pattern in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        bare = pattern.removeprefix("!").removeprefix("**/")
        names = [name.rpartition("/")[2] for name in around] if "**/" in pattern else around
        if any(fnmatch.fnmatchcase(name, bare) for name in names):
            seen = pattern.startswith("!")
    return seen


def copy(source: str, target: Path) -> None:
    """A file or folder of the context."""
    for folder, folders, files in os.walk(ROOT / source) if (ROOT / source).is_dir() else [(ROOT, [], [source])]:
        for name in [*files, *(name for name in folders if (Path(folder) / name).is_symlink())]:
            path = (Path(folder) / name).relative_to(ROOT)
            if in_context(str(path)):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, target / path, follow_symlinks=False)


def take(view: Path, arguments: dict[str, str]) -> int:
    """Take all steps in a view of the system; returns the status of the first that fails."""
    variables = {"PATH": PATH} | {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    folder, user, begun = "/", "0", False
    for name, words in instructions():
        for known, value in (variables | arguments).items():
            words = words if name == "RUN" else words.replace(f"${{{known}}}", value)
        print(f"{name} {words}", flush=True)
        if name == "FROM":
            begun = True
        elif name == "ARG" and begun:
            key, _, default = words.partition("=")
            arguments.setdefault(key, default)
        elif name == "ENV":
            given = dict(pair.partition("=")[::2] for pair in words.split())
            variables |= {key: value for key, value in given.items() if value or key not in variables}
        elif name == "WORKDIR":
            folder = words
            (view / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            user = words
        elif name == "COPY":
            *sources, _ = words.split()
            for source in sources:
                copy(source, view / folder.lstrip("/"))
        elif name == "RUN":
            home = {"HOME": "/root" if user == "0" else "/tmp"}
            done = subprocess.run(
                ["chroot", f"--userspec={user}:{user}", str(view), "/bin/sh", "-c", f"cd {folder} && {words}"],
                env=home | variables | arguments,
            )
            if done.returncode:
                return done.returncode
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build takes it"
    )
    parser.add_argument(IN_NAMESPACE, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.in_namespace is None:
        with tempfile.TemporaryDirectory(prefix="image-") as scratch:  # whose mounts end with the namespace
            return subprocess.run(
                [
                    "unshare",
                    "--mount",
                    "--",
                    sys.executable,
                    __file__,
                    IN_NAMESPACE,
                    scratch,
                    *(f"--build-arg={each}" for each in given.build_arg),
                ]
            ).returncode
    scratch = Path(given.in_namespace)
    disk, image, view = scratch / "disk", scratch / "disk.img", scratch / "view"
    disk.mkdir()
    view.mkdir()
    with open(image, "wb") as file:
        file.truncate(12 << 30)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    (disk / "up").mkdir()
    (disk / "work").mkdir()
    subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={disk}/up,workdir={disk}/work", str(view)],
        check=True,
    )
    for name in ("dev", "proc"):
        subprocess.run(["mount", "--bind", f"/{name}", str(view / name)], check=True)
    return take(view, dict(each.partition("=")[::2] for each in given.build_arg))


if __name__ == "__main__":
    sys.exit(main())
