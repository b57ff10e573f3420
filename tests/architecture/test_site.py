"""The documentation as a site: every page is in it, and every link between pages leads somewhere."""

import subprocess
import sys

from tests.architecture.laws import ROOT


def test_the_site_is_built_without_warnings(tmp_path):
    """Sphinx warns of a link to a page or a heading that is not there, and of a page that the sidebar lacks."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--conf-dir", "docs"]
    site = tmp_path / "site"
    built = subprocess.run(
        [*command, "--doctree-dir", str(tmp_path / "read"), ".", str(site)], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    pages = [path.relative_to(ROOT) for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]]
    assert len(pages) > 10 and all((site / page.with_suffix(".html")).is_file() for page in pages)
    assert (site / "searchindex.js").stat().st_size > 10_000
