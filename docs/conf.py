"""The documentation as a site: `make docs` writes it to build/docs. Its pages are the repository's own files.

Sphinx reads them from the root of the repository, so that their links lead where they lead on a code host.
"""

from sphinx.application import Sphinx

project = "Cloze"
author = copyright = "The Cloze authors"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md"]
myst_heading_anchors = 4  # the deepest heading that a page is linked at
html_theme = "furo"
html_title = "Cloze"
html_show_sourcelink = False
smartquotes = False  # it would make a dash of the two that an option begins with
# Code blocks that mix commands with what they print are no language that could be lexed.
highlight_language = "none"

# The order of the pages in the sidebar; Sphinx says when one is missing.
PAGES = {
    "First steps": ["docs/install", "docs/tutorial", "docs/continue", "docs/adapt", "docs/recipes"],
    "Prepare": ["docs/prepare", "docs/data-format"],
    "Pretrain": ["docs/training", "docs/monitoring", "docs/clusters", "docs/scaling"],
    "Use": ["docs/finetune", "docs/use", "docs/evaluate", "docs/python"],
    "Reference": ["docs/reference"],
    "Figures": ["docs/performance", "docs/robustness", "docs/results", "docs/experiments"],
    "Inside": ["docs/architecture", "docs/model", "CONTRIBUTING", "CHANGELOG"],
}


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the README, which stays as it is, the table of contents that Sphinx asks for."""
    if name == root_doc:
        for caption, pages in PAGES.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
