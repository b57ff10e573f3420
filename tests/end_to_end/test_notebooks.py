"""The notebooks of examples/ are their pages in docs/, and run from top to bottom."""

import importlib.util
import re

import pytest

from tests.commands import forked_cloze
from tests.launching import ROOT

SPECIFICATION = importlib.util.spec_from_file_location("write_notebooks", ROOT / "docs" / "write_notebooks.py")
writing = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(writing)


@pytest.mark.parametrize("name", writing.NAMES)
def test_a_notebook_has_the_cells_of_its_page_and_what_the_page_quotes(name):
    text, notebook = writing.page(name), writing.stored(name)
    again = "python docs/write_notebooks.py writes it anew"
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == writing.cells(text), again
    code = writing.code(notebook)
    assert all(cell.execution_count for cell in code), again
    for number, quoted in writing.quotes(text):
        printed, pictures = writing.outputs(code[number - 1])
        if quoted.endswith(".png"):
            assert pictures == [(ROOT / "docs" / quoted).read_bytes()], again
        else:
            for line in quoted.splitlines():
                assert line in ("...", *printed.splitlines()), f"docs/{name}.md quotes what no cell has printed"


def test_links_of_a_page_lead_from_the_notebook_to_the_same_files():
    found = {
        link for name in writing.NAMES for _, source in writing.cells(writing.page(name)) for link in _links(source)
    }
    assert found and all((ROOT / "examples" / link.partition("#")[0]).exists() for link in found)


def _links(source):
    return (link for link in re.findall(r"\]\((.*?)\)", source) if not link.startswith("http"))


def _check_tutorial(printed):
    losses = [float(loss) for loss in re.findall(r"validation loss .* nsp (\S+)  nsp accuracy", printed)]
    assert losses[0] > 0.65 and losses[-1] < 0.45, "next sentences have been learned"
    pretrained, untrained = (float(found) for found in re.findall(r"'accuracy': ([\d.]+)", printed))
    assert pretrained > max(untrained + 0.1, 0.8), "on words that no label was given for"


def _check_continue(printed):
    before, after = (float(found) for found in re.findall(r"own +(-[\d.]+) +(-[\d.]+)", printed)[0])
    assert after > before + 0.1


_CHECKS = {"tutorial": _check_tutorial, "continue": _check_continue}


@pytest.mark.slow
@pytest.mark.parametrize("name", writing.NAMES)
def test_a_notebook_runs_in_an_empty_folder(name, tmp_path):
    notebook, folder = writing.build(writing.page(name)), tmp_path / "empty"
    folder.mkdir()
    with forked_cloze(tmp_path / "scripts") as program:
        writing.run(notebook, folder, program.parent)
    _CHECKS[name]("\n".join(writing.outputs(cell)[0] for cell in writing.code(notebook)))
