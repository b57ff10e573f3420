"""Results as JSON, as tables and in files."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cloze.launch.cli import main
from cloze.launch.predict.labels import Classify, Label, Labels
from cloze.launch.predict.operation import Row
from cloze.launch.predict.output import write_results
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.vectors import Embed
from cloze.model.problems import HeadConfig
from cloze.pipeline.errors import UserError
from tests.launch.errors import error_of
from tests.launch.predict.asking import lines


def test_each_operation_as_json_equals_python(folders, capsys, tmp_path):
    model = Predictor.from_folder(folders / "pretrained")
    (line,) = lines(capsys, "predict", "fill-mask", folders / "pretrained", "--top_k", 2, "the [MASK] sat on [MASK]")
    expected = model.fill_mask("the [MASK] sat on [MASK]", top_k=2)
    assert [[guess["token"] for guess in blank] for blank in line["blanks"]] == [
        [guess.token for guess in blank] for blank in expected
    ]
    assert line["blanks"][1][0]["probability"] == pytest.approx(expected[1][0].probability, abs=1e-6)
    found = lines(capsys, "predict", "classify", folders / "classifier", "good film", "bad film", "--pair", "a film")
    assert [line["text"] for line in found] == ["good film", "bad film"] and found[0]["pair"] == "a film"
    assert {label["label"] for label in found[0]["labels"]} == {"bad", "good"} and found[0]["cut_tokens"] == 0
    (line,) = lines(capsys, "predict", "tag", folders / "tagger", "the man went to newyork", "--aggregation", "none")
    assert all(line["text"][tag["start"] : tag["end"]] == tag["text"] for tag in line["tags"]) and line["tags"]
    (line,) = lines(
        capsys, "predict", "answer", folders / "answerer", "who sat", "--top_k", 2, "--context", "the cat sat"
    )
    assert line["question"] == "who sat" and len(line["answers"]) == 2
    found = lines(capsys, "predict", "similarity", folders / "pretrained", "cat", "the cat", "sky", "--pooling", "max")
    expected = [model.similarity("cat", other, "max") for other in ("the cat", "sky")]
    assert [line["cosine"] for line in found] == pytest.approx(expected, abs=1e-5)
    (line,) = lines(capsys, "predict", "features", folders / "pretrained", "the cat", "--layer", 1)
    assert line["tokens"] == ["[CLS]", "the", "cat", "[SEP]"] and line["offsets"][2] == [4, 7]
    assert np.shape(line["vectors"]) == (4, 32)
    found = lines(capsys, "predict", "features", folders / "pretrained", "apple phone", "an apple", "--word", "apple")
    assert [(line["start"], line["end"]) for line in found] == [(0, 5), (3, 8)] and len(found[0]["cosines"]) == 2
    (line,) = lines(capsys, "predict", "score", folders / "pretrained", "name into form")
    assert line["log_probability"] == pytest.approx(sum(each["log_probability"] for each in line["tokens"]))


def test_a_table_where_a_person_reads(folders, capsys):
    arguments = ("predict", "fill-mask", str(folders / "pretrained"), "the [MASK] sat [MASK]", "--format", "table")
    assert main(list(arguments)) == 0
    printed = capsys.readouterr().out
    assert "guesses" in printed and printed.count("the [MASK] sat [MASK]") == 1 and "│ 2 " in printed
    sentences = ["name into form", "name into from", "the sky is blue"]
    assert main(["predict", "score", str(folders / "pretrained"), *sentences, "--format", "table"]) == 0
    printed = capsys.readouterr().out
    model = Predictor.from_folder(folders / "pretrained")
    ranked = sorted(sentences, key=lambda text: -model.score(text).log_probability)
    assert sorted(sentences, key=printed.index) == ranked, "the likeliest first"
    for kind, folder, rest in (
        ("tag", "tagger", ["a"]),
        ("classify", "classifier", ["a [b]"]),
        ("embed", "pretrained", ["a"]),
        ("features", "pretrained", ["a"]),
        ("similarity", "pretrained", ["a", "i"]),
        ("features", "pretrained", ["apple", "--word", "apple"]),
        ("answer", "answerer", ["who", "--context", "a man"]),
    ):
        assert main(["predict", kind, str(folders / folder), *rest, "--format", "table"]) == 0
        assert "━" in capsys.readouterr().out


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


def test_parquet_keeps_the_values_of_the_input(folders, capsys, tmp_path):
    """Numbers and objects of a later row do not fit the first ones' type; vectors of the input are not the model's."""
    arguments = ("predict", "classify", folders / "classifier", "--file", tmp_path / "rows.jsonl", "--output")
    given = {"x": [0.123456789012345, 1e300, 16777217.0], "n": 1, "large": 2**64 - 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the cat"} | given) + "\n")
    assert main([str(argument) for argument in (*arguments, tmp_path / "found.parquet")]) == 0
    assert pq.read_table(tmp_path / "found.parquet").select(list(given)).to_pylist() == [given]
    loaded = Predictor.from_folder(folders / "classifier").loaded
    both = [{"text": "the cat", "x": {"p": 1, "q": [{"r": 2}]}}] * 4096 + [{"text": "the cat", "x": {"p": 1}}]
    labels = Labels([Label("bad", 0.5), Label("good", 0.5)], 0)
    found = [(Row(row["text"], values=row), labels) for row in both]
    assert write_results(tmp_path / "optional.parquet", Classify(), loaded, found) == len(both)
    assert pq.read_table(tmp_path / "optional.parquet")["x"][-1].as_py() == {"p": 1, "q": None}
    for first, late in (
        (None, 1),
        (1, 1.5),
        ({"p": 1}, {"q": 2}),
        ([1], [1.5]),
        ({"p": [1]}, {"p": [1.5]}),
        (2**63, -1),
    ):
        rows = [{"text": "the cat", "x": first}] * 4096 + [{"text": "the cat", "x": late}]
        found = [(Row(row["text"], values=row), labels) for row in rows]
        with pytest.raises(UserError, match="found.parquet: found values that are no column of a table.*'x'"):
            write_results(tmp_path / "found.parquet", Classify(), loaded, found)


@pytest.mark.parametrize("name", ["found.jsonl", "found.parquet"])
def test_values_of_a_parquet_that_json_lacks(folders, tmp_path, name):
    """Structs of dictionaries in several row groups, which pyarrow joins to no batch, are there too."""
    kinds = pa.array(["a", "b", "a"]).dictionary_encode()
    table = pa.table(
        {
            "text": ["the cat", "sat", "the mat"],
            "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
            "bytes": [b"\xff\x00", b"", None],
            "number": [math.inf, math.nan, 0.5],
            "kind": pa.StructArray.from_arrays([kinds], ["name"]),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    arguments = ("predict", "classify", folders / "classifier", "--file", tmp_path / "rows.parquet")
    assert main([str(argument) for argument in (*arguments, "--output", tmp_path / name)]) == 0
    if name.endswith("parquet"):
        found = pq.read_table(tmp_path / name).to_pylist()
    else:
        found = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [row["map"] for row in found] == [[{"key": "a", "value": 1}], [], None]
    assert [row["bytes"] for row in found] == ["/wA=", "", None]
    assert [row["number"] for row in found] == [None, None, 0.5]
    assert [row["kind"] for row in found] == [{"name": name} for name in ("a", "b", "a")]


def test_results_that_would_be_one_column_are_refused(tmp_path):
    columns = (("a", ("b_c", "x")), ("a_b", ("c", "y")))
    result = Labels([Label(label, 0.5, name) for name, labels in columns for label in labels], 0)
    head = HeadConfig(tuple(f"{name}: {label}" for name, labels in columns for label in labels), "columns", columns)
    loaded = SimpleNamespace(model=SimpleNamespace(head=head))
    with pytest.raises(UserError, match="found two results that would both be the column 'probability_a_b_c'"):
        Classify().columns(loaded, result)
    assert "probability_a_b" in Classify(top_k=1).columns(loaded, result)


@pytest.mark.parametrize("value", ["1180591620717411303424", "[9223372036854775808]", "{}", '{"a": {}}', "[{}]"])
def test_a_value_that_parquet_has_no_type_for(folders, capsys, tmp_path, value):
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "the cat", "x": {value}}}\n')
    arguments = ("predict", "classify", folders / "classifier", "--file", tmp_path / "rows.jsonl", "--output")
    error = error_of(capsys, *arguments, tmp_path / "found.parquet")
    assert "found.parquet: found values that" in error and "write *.jsonl" in error
    assert not (tmp_path / "found.parquet").exists()


@pytest.mark.parametrize("name", ["r.jsonl", "r.npy", "r.csv", "r.tsv", "r.parquet"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_in_every_file(folders, capsys, tmp_path, monkeypatch, name, number):
    """Of weights that overflow on one text; the file is not there."""
    finish = Embed.finish

    def overflowing(self, *given):
        made = finish(self, *given)
        made.vector[1] = number
        return made

    monkeypatch.setattr(Embed, "finish", overflowing)
    (tmp_path / "texts.txt").write_text("the cat\n")
    arguments = ("predict", "embed", folders / "pretrained", "--file", tmp_path / "texts.txt", "--output")
    assert "found a number that is not finite" in error_of(capsys, *arguments, tmp_path / name)
    assert not (tmp_path / name).exists()
