"""Memory is bounded, whatever the input is."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from cloze.pipeline.shards.manifest import Manifest
from tests.pipeline import corpus


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "parquet", "jsonl.gz"])
def test_an_enormous_document_stays_within_memory(tmp_path, kind):
    """64 MB in one line or row; a worker may take 1.5 GB for any input, and takes much less for this one."""
    words = " ".join(corpus.documents(2000)).replace("\n", " ") + " "
    enormous = words * (64 * 10**6 // len(words))
    others = [text.replace("\n", " ") for text in corpus.documents(70, seed=1)]
    if kind == "txt":
        (tmp_path / "a.txt").write_text("\n\n".join([enormous, *others]))
    elif kind == "jsonl.gz":
        corpus.write_jsonl(tmp_path / f"a.{kind}", [enormous, *others])
    else:
        parquet.write_table(pa.table({"text": [enormous, *others]}), tmp_path / "a.parquet")
    script = (
        "import sys; from pathlib import Path; from cloze.launch.system.memory import peak_bytes;"
        "from cloze.pipeline.jobs.prepare import prepare; from tests.pipeline import corpus;"
        "folder = Path(sys.argv[1]);"
        "prepare(corpus.config(folder, [folder / sys.argv[2]], shards=corpus.ShardsConfig()));"
        "print(peak_bytes() >> 20)"
    )
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", script, str(tmp_path), f"a.{kind}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # MB
    assert Manifest.load(tmp_path / "data").counts["documents_in_pieces"] == 1
