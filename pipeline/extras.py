"""The command that installs an extra of setup.cfg into this installation."""

import json
import shlex
from importlib import metadata
from urllib.parse import unquote, urlsplit

from cloze.version import DISTRIBUTION


def how_to_install(extra: str) -> str:
    """The pip command that adds an extra to this installation, from its origin (PEP 610: direct_url.json): a checkout,
    a wheel or a repository; otherwise by name from the index.
    """
    try:
        noted = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # imported from a folder
        noted = None
    origin = json.loads(noted) if noted else {}
    url = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install -e {shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    if repository := origin.get("vcs_info"):
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    return f"pip install {shlex.quote(f'{DISTRIBUTION}[{extra}]' + (f' @ {url}' if url else ''))}"
