"""Tables as other programs write them: classes saved as numbers, truth values, columns under other names."""

import csv
import gzip
import json
import os

import numpy as np
import polars
import pyarrow as pa
import pytest
from pyarrow import parquet
from sklearn.metrics import matthews_corrcoef

from cloze.launch.cli import main
from cloze.launch.texts import tables
from cloze.launch.texts.tables import open_table, read_table, read_text
from cloze.pipeline.errors import UserError
from tests.hostile_tables import flipped_footers, flipped_page_heads, readings, write_numbers
from tests.launch.finetune.examples.test_classification import GLUE, read
from tests.launch.finetune.running import finetune
from tests.launch.finetune.small import make_model, write_tsv

PAIRS = {"sentence1": ["w1 w2", "w3", "w4"], "sentence2": ["fine w5", "dull", "w6"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def saved(path, kind: str, classes: dict, columns: dict):
    """What `datasets` makes of columns, some of which are numbers of named classes, or lists of them."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict(columns)
    for column, names in classes.items():
        feature = datasets.ClassLabel(names=names)
        data = data.cast_column(column, [feature] if isinstance(columns[column][0], list) else feature)
    if kind == "folder":
        data.save_to_disk(path)
    else:
        data.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_classes_that_datasets_saves_as_numbers_have_their_names(model, tmp_path, kind):
    """GLUE's as the hub has it: RTE by name, SST-2 by number, as gluebenchmark.com has them; a test set's are -1."""
    path = tmp_path / f"train.{kind}"
    rte = saved(path, kind, {"label": ["entailment", "not_entailment"]}, PAIRS | {"label": [1, 0, 1]})
    hidden = saved(
        tmp_path / f"test.{kind}", kind, {"label": ["entailment", "not_entailment"]}, PAIRS | {"label": [-1, -1, -1]}
    )
    _, head, train, _, (test,) = read("rte", model, rte, "--test", hidden)
    assert head.labels == ("entailment", "not_entailment") and not test.labelled
    assert train.targets(np.arange(3))["labels"].tolist() == [1, 0, 1]
    texts = {"sentence": ["w1 fine", "w2 dull"], "label": [1, 0]}
    path = saved(tmp_path / f"sst2.{kind}", kind, {"label": ["negative", "positive"]}, texts)
    _, head, train, _, _ = read("sst2", model, path)
    assert head.labels == ("0", "1") and train.targets(np.arange(2))["labels"].tolist() == [1, 0]
    _, head, train, _, _ = read("classification", model, path, "--text_columns", "sentence")
    assert head.labels == ("negative", "positive") and train.targets(np.arange(2))["labels"].tolist() == [1, 0]
    _, _, train, _, _ = read("regression", model, path, "--text_columns", "sentence")
    assert train.targets(np.arange(2))["labels"].flatten().tolist() == [1.0, 0.0]
    path = saved(
        tmp_path / f"lists.{kind}",
        kind,
        {"labels": ["red", "blue"]},
        {"text": ["w1", "w2", "w3"], "labels": [[0, 1], [], [1]]},
    )
    _, head, train, _, _ = read("multi-label", model, path)
    assert head.labels == ("blue", "red") and train.targets(np.arange(3))["labels"].tolist() == [[1, 1], [0, 0], [1, 0]]


def test_a_model_from_a_saved_data_set_knows_its_classes_by_name(model, tmp_path):
    path = saved(tmp_path / "data", "folder", {"label": ["entailment", "not_entailment"]}, PAIRS | {"label": [1, 0, 1]})
    finetune("rte", model, path, path, tmp_path / "run", "--epochs", 1)
    assert json.loads((tmp_path / "run/model/config.json").read_text())["id2label"] == {
        "0": "entailment",
        "1": "not_entailment",
    }


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_columns_of_yes_and_no_may_be_truth_values_and_no_whole_numbers(model, tmp_path, kind):
    table = polars.DataFrame(
        {"text": ["w1", "w2", "w3"], "a": [True, False, True], "b": [1.0, 0.0, 0.0], "c": [0, 1, 0]}
    )
    path = tmp_path / f"train.{kind}"
    {"parquet": table.write_parquet, "csv": table.write_csv, "jsonl": table.write_ndjson}[kind](path)
    _, head, train, _, _ = read("multi-label", model, path, "--label_columns", "a", "b", "c")
    assert head.labels == ("a", "b", "c")
    assert train.targets(np.arange(3))["labels"].tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_the_labelled_diagnostic_set_is_a_test_file_of_mnli(model, tmp_path):
    header, row, _ = GLUE["mnli"]
    train = write_tsv(tmp_path / "train.tsv", header, [row])
    labels = ["entailment", "neutral", "contradiction", "neutral"]
    diagnostic = write_tsv(
        tmp_path / "diagnostic-full.tsv",
        (
            "Lexical Semantics",
            "Predicate-Argument Structure",
            "Logic",
            "Knowledge",
            "Domain",
            "Premise",
            "Hypothesis",
            "Label",
        ),
        [("", "", "Negation", "", "Artificial", f"w{n}", "w1 w2", label) for n, label in enumerate(labels)],
    )
    _, head, _, validation, (test,) = read("mnli", model, train, "--test", diagnostic)
    outputs = np.eye(3, dtype=np.float32)[[1, 2, 0, 0]]
    assert [each["label"] for each in test.predictions(outputs)] == labels and test.text(1) == "w1 / w1 w2"
    guessed = [head.labels[number] for number in (1, 2, 0, 0)]
    assert test.metrics(outputs)["matthews_correlation"] == pytest.approx(matthews_corrcoef(labels, guessed))
    assert "matthews_correlation" not in validation.metrics(outputs[:1])


@pytest.mark.parametrize(
    "task, seen, found, said",
    [
        (
            "label-columns",
            "s",
            "xl",
            "row 1: found the label 'xl', expected one of 1: s; fix the row",
        ),
        ("multi-label", 1, 2, "row 1: found 2 in column 'a', expected 0 or 1; fix the row"),
    ],
)
def test_labels_that_columns_do_not_have_are_not_to_be_listed(model, tmp_path, capsys, task, seen, found, said):
    """--labels is refused for these."""
    for name, value in (("train", seen), ("dev", found)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "w1", "a": value, "b": seen}) + "\n")
    assert (
        main(
            [
                "finetune",
                task,
                "--model",
                str(model),
                "--train",
                str(tmp_path / "train.jsonl"),
                "--validation",
                str(tmp_path / "dev.jsonl"),
                "--output",
                str(tmp_path / "run"),
                "--max_length",
                "32",
                "--label_columns",
                "a",
                "b",
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.strip().endswith(f"dev.jsonl: {said}")


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_columns_and_fields_of_one_name_are_refused(tmp_path, kind):
    """Of two the last one would have been read, in silence."""
    path = tmp_path / f"train.{kind}"
    {
        "parquet": lambda: parquet.write_table(
            pa.table([["w1"], ["a"], ["b"]], names=["text", "label", "label"]), path
        ),
        "csv": lambda: path.write_text("text,label,label\nw1,a,b\n"),
        "jsonl": lambda: path.write_text('{"text": "w1", "label": "a", "label": "b"}\n'),
    }[kind]()
    found = "field 'label' twice" if kind == "jsonl" else "columns text, label, label"
    with pytest.raises(UserError, match=f"train.{kind}.*: .*found the {found}"):
        read_table(path)


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.conll", "a.tsv.gz"])
def test_files_of_another_encoding_are_refused(tmp_path, name):
    """Without a byte order mark UTF-16 is UTF-8, with zero bytes."""
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wb") as file:
        file.write("text\tlabel\nw1\ta\n".encode("utf-16-le"))
    with pytest.raises(UserError, match=f"{name}: found a byte 0x00, as of UTF-16, expected text in UTF-8; convert it"):
        read_text(tmp_path / name) if name == "a.conll" else read_table(tmp_path / name)


def test_a_flipped_byte_of_a_parquet_page_with_a_checksum_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"text": ["some words", "and more"]}),
        path,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    content = path.read_bytes()
    assert len(read_table(path).rows) == 2 and content.count(b"words") == 1
    path.write_bytes(content.replace(b"words", b"wordz"))
    with pytest.raises(UserError, match="a.parquet: can't be read as Parquet: .*CRC checksum"):
        read_table(path)


@pytest.mark.parametrize(
    ("flipped", "said"),
    [(flipped_page_heads, "rows fewer than its footer says"), (flipped_footers, "row groups by its footer")],
)
def test_a_flipped_bit_of_parquet_that_no_checksum_covers_loses_no_row(tmp_path, flipped, said):
    refused = 0
    for whole in flipped(tmp_path / "a.parquet"):
        try:
            assert [row.values["text"] for row in read_table(tmp_path / "a.parquet").rows] == whole
        except UserError as error:
            refused += said in str(error)
    assert refused > 4


@pytest.mark.parametrize("number", [-1, -2, 2**31 - 1])
def test_a_number_of_no_value_of_a_parquet_dictionary_is_an_error(tmp_path, number):
    """Arrow reads what lies before its memory."""
    write_numbers(tmp_path / "a.parquet", [f"text {each % 7}" for each in range(60)], number)
    with pytest.raises(UserError, match="a.parquet: can't be read as Parquet: .*out of bounds"):
        read_table(tmp_path / "a.parquet")


def test_hostile_fields_are_read_as_they_were_written(tmp_path):
    """And the same tables damaged: a line, or rows."""
    assert [wrong for _, wrong in readings(tmp_path, 1500, seed=0) if wrong] == []


CLASSES = {"_type": "ClassLabel", "names": ["x", "y"]}


@pytest.mark.parametrize(
    "metadata",
    ["{", "[" * 100_000, "3", '{"info": null}', '{"info": {"features": {"label": [1, 2]}}}']
    + [
        json.dumps({"info": {"features": {"label": feature}}})
        for feature in (
            None,
            {"_type": "List"},
            {"_type": "ClassLabel"},
            CLASSES | {"names": "xy"},
            CLASSES | {"names": ["x", "x"]},
        )
    ],
)
def test_hostile_metadata_of_a_parquet_file_are_refused(tmp_path, metadata):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a", "b"], "label": [0, 1]})
    parquet.write_table(table.replace_schema_metadata({"huggingface": metadata}), path)
    with pytest.raises(UserError, match="^[^\n]*a.parquet: found other metadata under 'huggingface' than .* anew"):
        read_table(path)


def test_values_of_a_parquet_file_that_are_none_are_refused(tmp_path):
    """A class that has no name, and texts that are no UTF-8."""
    path = tmp_path / "a.parquet"
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": CLASSES}}})}
    table = pa.table({"text": ["a", "b"], "label": [1, 2]})
    parquet.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(UserError, match="a.parquet: row 2: label: found '2', expected the number of one of its 2"):
        read_table(path)
    parquet.write_table(pa.table({"text": pa.array([b"\xff"]).view(pa.string())}), path)
    with pytest.raises(UserError, match="a.parquet: can't be read as Parquet: In column 0: .*UTF8"):
        read_table(path)


def test_a_saved_data_set_that_shrinks_is_named(tmp_path):
    """The library maps its files: a page that is gone would end the process."""
    path = saved(tmp_path / "a.folder", "folder", {}, {"text": [f"{number} {'w ' * 500}" for number in range(400)]})
    rows = open_table(path).rows
    next(rows)
    (data,) = path.glob("*.arrow")
    os.truncate(data, data.stat().st_size // 4)
    with pytest.raises(UserError, match="a.folder: changed while it was read"):
        list(rows)


def test_an_empty_cell_of_a_table_of_one_column_is_a_row(tmp_path):
    """Left out, results would be of other rows than those beside which they stand; an empty line is none."""
    for name, mark in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):  # before the names of columns too
        (tmp_path / name).write_text(f"\n\nticket{mark}label\n\na heron{mark}x\n")
        (row,) = open_table(tmp_path / name).rows
        assert row.values == {"ticket": "a heron", "label": "x"}
    (tmp_path / "one.csv").write_text('ticket\na heron\n""\n\nthe owl hunts\n')
    assert [row.values["ticket"] for row in open_table(tmp_path / "one.csv").rows] == ["a heron", "", "the owl hunts"]
    (tmp_path / "one.tsv").write_text("ticket\na heron\n\nthe owl hunts\n")
    assert [row.values["ticket"] for row in open_table(tmp_path / "one.tsv").rows] == ["a heron", "the owl hunts"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize(
    "names", [("text", "label", "a\nb"), ("a;b, c\td", "a\r\n;b"), ("te.xt", 'a"\n"b', "c\n"), ("te\nxt", "b")]
)
def test_a_name_with_a_line_break_hides_no_delimiter(tmp_path, delimiter, names):
    """As spreadsheets write a name of two lines; other delimiters are in quoted names alone."""
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([names, ["1,;\t2", *"x" * (len(names) - 1)]])
    assert [tuple(row.values) for row in read_table(tmp_path / "t.csv").rows] == [names]


@pytest.mark.parametrize("row", ["1,2,3", '"1","2'])
def test_a_column_whose_name_has_line_breaks_keeps_a_message_on_its_line(tmp_path, row):
    (tmp_path / "t.csv").write_text(f'text,"a\n\nb"\n{row}\n')
    with pytest.raises(UserError) as error:
        list(read_table(tmp_path / "t.csv").rows)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.tsv.gz", "a.csv.gz", "a.jsonl.gz"])
def test_next_to_nothing_many_times_is_refused(tmp_path, monkeypatch, name):
    """A thousandth of it as a file, and as rows a hundred times that."""
    always = 1 << 19
    monkeypatch.setattr(tables, "_ALWAYS_READ", always)
    line = '{"text": "a", "label": "b"}\n' if "json" in name else "a,b\n" if "csv" in name else "a\tb\n"
    with gzip.open(tmp_path / name, "wt") as file:
        file.write(line * (always // len(line) * 10 // 9))
    with pytest.raises(UserError, match=f"{name}: found more than .* times the size of the file"):
        for _ in open_table(tmp_path / name).rows:
            pass
