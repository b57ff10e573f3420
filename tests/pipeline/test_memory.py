"""Memory is bounded, whatever the input is."""

import os
import subprocess
import sys

import pytest

from pipeline.manifest import Manifest
from tests.pipeline import corpus


@pytest.mark.slow
def test_an_enormous_line_stays_within_memory(tmp_path):
    """64 MB in one line; a worker may take 1.5 GB for any input, and takes much less for this one."""
    words = " ".join(corpus.documents(2000))
    with open(tmp_path / "a.txt", "w") as file:
        for _ in range(64 * 10**6 // len(words)):
            file.write(words.replace("\n", " ") + " ")
        file.write("\n\n" + "\n\n".join(text.replace("\n", " ") for text in corpus.documents(70, seed=1)))
    script = (
        "import resource, sys; from pathlib import Path; from pipeline.prepare import prepare;"
        "from tests.pipeline import corpus; folder = Path(sys.argv[1]);"
        "prepare(corpus.config(folder, [folder / 'a.txt'], shards=corpus.ShardsConfig()));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # MB
    assert Manifest.load(tmp_path / "data").counts["documents_in_pieces"] == 1
