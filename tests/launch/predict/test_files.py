"""Results that are written into files."""

import numpy as np
import pyarrow.parquet as pq

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from tests.launch.errors import error_of


def test_vectors_in_files(folders, capsys, tmp_path):
    texts = [f"the cat {'sat ' * number}" for number in range(5)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    expected = Predictor.from_folder(folders / "pretrained").embed(texts, pooling="cls", layer=2)
    arguments = (
        "predict",
        "embed",
        folders / "pretrained",
        "--file",
        tmp_path / "texts.txt",
        "--pooling",
        "cls",
        "--layer",
        2,
        "--output",
    )
    for name in ("vectors.npy", "vectors.parquet"):
        assert main([str(argument) for argument in (*arguments, tmp_path / name)]) == 0
        assert "wrote 5 results" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(tmp_path / "vectors.npy"), expected)
    table = pq.read_table(tmp_path / "vectors.parquet")
    assert table["text"].to_pylist() == texts
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), expected)
    assert "ends in .csv, .tsv, .parquet, .jsonl, .npy" in error_of(capsys, *arguments, tmp_path / "vectors.txt")
