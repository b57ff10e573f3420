"""Write each page of docs/ that is a notebook too into examples/, with what its cells print and draw:

python docs/write_notebooks.py [NAME ...]

The cells of a page are run if one has changed; otherwise the notebook keeps its outputs. A page's ```python and ```bash
blocks are the cells; ```text blocks and pictures, which quote what the cells before them give, are left out of the
notebook, which has all of it. Pictures are stored beside the page, too.
"""

import base64
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("tutorial", "continue")
SECONDS_A_CELL = 1800  # for machines that are busy with other tests

_BLOCK = re.compile(r"^```(python|bash|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"^!\[.*?\]\((.*?)\)\n", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#|\.\./)")  # relative to docs/, which is not where the notebook is


def page(name: str) -> str:
    """The text of a page."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def stored(name: str) -> Any:
    """The notebook of a page as it is in the repository."""
    return nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)


def cells(text: str) -> list[tuple[str, str]]:
    """The cells of a page in order: (`markdown` or `code`, source)."""
    pieces = _BLOCK.split(text)
    result = []
    for prose, language, block in zip(pieces[::3], [*pieces[1::3], "text"], [*pieces[2::3], ""], strict=True):
        prose = _LINK.sub("](../docs/", _PICTURE.sub("", prose)).replace("](../docs/../", "](../")
        result.append(("markdown", prose.strip()))
        if language != "text":
            result.append(("code", ("%%bash -e\n" if language == "bash" else "") + block.strip()))
    return [cell for cell in result if cell[1]]


def quotes(text: str) -> list[tuple[int, str]]:
    """What a page quotes of its cells' output: (number of code cells before it, block of text or name of a picture)."""
    found, count = [], 0
    for piece in re.finditer(f"{_BLOCK.pattern}|{_PICTURE.pattern}", text, re.MULTILINE | re.DOTALL):
        language, block, picture = piece.groups()
        if language in ("python", "bash"):
            count += 1
        else:
            found.append((count, picture or block))
    return found


def build(text: str) -> Any:
    """The notebook of a page, without output."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, (kind, source) in enumerate(cells(text)):
        new = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        notebook.cells.append(new(source, id=f"cell-{number}"))
    return notebook


def run(notebook: Any, folder: Path, scripts: Path = Path(sys.executable).parent) -> None:
    """Run all cells in a kernel of their own, in a folder.

    Args:
        scripts: the folder of the `cloze` that they call.
    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    client = NotebookClient(
        notebook,
        timeout=SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    client.execute(env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"})


def outputs(cell: Any) -> tuple[str, list[bytes]]:
    """What a cell has printed, without colours, and drawn."""
    texts, pictures = [], []
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            pictures.append(base64.b64decode(data["image/png"]))
        else:
            texts.append(output.get("text") or data.get("text/plain", ""))
    return re.sub(r"\x1b\[[\d;]*m", "", "".join(texts)), pictures


def code(notebook: Any) -> list[Any]:
    """The cells of a notebook that are run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def fill(notebook: Any, name: str) -> None:
    """Give the cells their outputs: those of the notebook in the repository if it has the same cells, else by a run."""
    if (ROOT / "examples" / f"{name}.ipynb").exists():
        before = code(stored(name))
        if [cell.source for cell in before] == [cell.source for cell in code(notebook)]:
            for new, old in zip(code(notebook), before, strict=True):
                new.outputs, new.execution_count = old.outputs, old.execution_count
            return
    with tempfile.TemporaryDirectory() as folder:
        run(notebook, Path(folder))


def main() -> None:
    """Write all notebooks, or those that are named."""
    for name in sys.argv[1:] or NAMES:
        notebook = build(page(name))
        fill(notebook, name)
        for number, quoted in quotes(page(name)):
            if quoted.endswith(".png"):
                (picture,) = outputs(code(notebook)[number - 1])[1]
                (ROOT / "docs" / quoted).write_bytes(picture)
        nbformat.write(notebook, ROOT / "examples" / f"{name}.ipynb")


if __name__ == "__main__":
    main()
