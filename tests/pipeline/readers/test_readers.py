"""Readers: every document once, wherever a file is cut, however it is compressed."""

import gzip
import json
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.pipeline import readers
from cloze.pipeline.config import PrepareConfig, SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.formats import FORMATS
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.progress import Progress
from cloze.pipeline.readers import columns, files, lines
from tests.hostile_tables import flipped_footers, flipped_page_heads, write_numbers
from tests.pipeline import corpus
from tests.pipeline.readers.inputs import compress, read, texts
from tests.tables import assert_same_names


def test_a_place_that_an_order_key_has_no_bits_for_is_refused(tmp_path):
    """The key of row 2^28 of a file, or of a byte behind 1 TiB, would be one of the next file."""
    parquet.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    _, ((segment,),) = readers.plan(PrepareConfig(input=[str(tmp_path / "a.parquet")]))
    rows = pa.RecordBatch.from_pydict({"text": ["one", "two"]})
    table = columns.Rows(columns.PARQUET.segments, lambda _: iter([((1 << 28) - 2, rows)]))
    last = [document.order for document in table.read(segment)][-1]
    assert last < lines.order(replace(segment, file=replace(segment.file, number=1)), 0)
    table = columns.Rows(columns.PARQUET.segments, lambda _: iter([((1 << 28) - 1, rows)]))
    with pytest.raises(UserError, match="a.parquet: found row 268,435,456, expected at most .* divide it$"):
        list(table.read(segment))
    assert lines.order(segment, (1 << 40) - 1) == (1 << 40) - 1
    with pytest.raises(UserError, match="a.parquet: found a document behind 1 TiB, expected a shorter file; divide it"):
        lines.order(segment, 1 << 40)


def test_a_size_that_no_file_has_is_refused_before_it_is_divided(tmp_path, monkeypatch):
    """As a store's listing may say; the tasks of a wrong size would fill the memory."""
    (tmp_path / "a.txt").write_text("one two")
    monkeypatch.setattr(readers, "_MOST_BYTES", 6)
    with pytest.raises(UserError, match="a.txt: found a size of 7 bytes, expected at most 6; look at what its disk"):
        readers.plan(PrepareConfig(input=[str(tmp_path)]))


def test_sizes_of_any_sum_make_a_bounded_number_of_tasks(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("one two three four\n" * 500)
    monkeypatch.setattr(readers, "_SEGMENT_BYTES", (100, 100))
    monkeypatch.setattr(readers, "_GROUP_BYTES", 1)
    given = PrepareConfig(input=[str(tmp_path)], source=SourceConfig(format="documents"))
    assert len(readers.plan(given)[1]) == 2 * 95
    monkeypatch.setattr(readers, "_MOST_SEGMENTS", 10)
    _, tasks = readers.plan(given)
    assert len(tasks) == 10 and {segment.stop - segment.start for task in tasks for segment in task} == {1900}


def data_set(made: list[str]):
    return pytest.importorskip("datasets").Dataset.from_dict({"text": made})


WRITERS = {
    "text": lambda folder, made: (folder / "a").write_text("\n\n".join(made)),
    "file": lambda folder, made: [(folder / f"{number}").write_text(text) for number, text in enumerate(made)],
    "lines": lambda folder, made: (folder / "a").write_text("\n\n".join(made)),
    "documents": lambda folder, made: (folder / "a").write_text("\n".join(made)),
    "pairs": lambda folder, made: (folder / "a").write_text("\n".join(made)),
    "jsonl": lambda folder, made: (folder / "a").write_text("".join(json.dumps({"text": t}) + "\n" for t in made)),
    "parquet": lambda folder, made: parquet.write_table(pa.table({"text": made}), folder / "a"),
    "dataset": lambda folder, made: (
        pytest.importorskip("datasets").Dataset.from_dict({"text": made}).save_to_disk(folder)
    ),
}


def test_every_format_has_a_writer():
    assert_same_names(FORMATS, WRITERS, "WRITERS in this file, what writes texts into a file of a format")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_the_documents_of_json_lines(tmp_path, form):
    made = ["one a\tline two", "two\tthree", "four, é中\tfive"]  # what each can hold
    (tmp_path / "lines").mkdir()
    (tmp_path / "own").mkdir()
    WRITERS["jsonl"](tmp_path / "lines", made)
    WRITERS[form](tmp_path / "own", made)
    assert texts([tmp_path / "own"], format=form) == texts([tmp_path / "lines"], format="jsonl") == made
    for suffix in FORMATS[form].suffixes:
        (tmp_path / f"a{suffix}").write_bytes(next((tmp_path / "own").iterdir()).read_bytes())
        assert texts([tmp_path / f"a{suffix}"]) == made, "by its name alone"


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if ".lines:" in form.reference])
def test_text_of_every_format_is_whole_if_it_is_long_and_its_bytes_are_characters(tmp_path, monkeypatch, form):
    """Of several blocks, which end within it; around it stand short ones."""
    monkeypatch.setattr(lines, "LONGEST_PIECE", 1000)
    monkeypatch.setattr(files, "BLOCK_BYTES", 300)
    long = "long\t" + " ".join(f"w{number}é" for number in range(900))
    made = ["one\ttwo", long, "three\tfour"]
    WRITERS[form](tmp_path, made)
    found = read([tmp_path], format=form)
    assert " ".join(document.text.decode() for document in found).split() == " ".join(made).split()
    assert [document.piece for document in found if document.piece < 2] in ([0, 1, 0], [0, 0, 0])
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes().replace(b"w7", b"w\xff"))
    with pytest.raises(UserError, match="found byte 0xff"):
        read([tmp_path], format=form)
    found = read([tmp_path], format=form, encoding_errors="replace")
    assert sum(document.damaged for document in found) and "w\ufffd" in " ".join(each.text.decode() for each in found)


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(UserError, match="source.format: found 'jsnl', expected one of: auto, text, "):
        read([tmp_path], format="jsnl")


@given(parts=st.lists(st.sampled_from(["ab", "c d", "é中", "\n", "\n\n", "\r\n\r\n", " ", "\ufeff"]), max_size=20))
@pytest.mark.parametrize("form", ["text", "lines", "documents", "file", "pairs", "jsonl"])
def test_a_small_file_that_was_read_at_once_has_the_same_documents(tmp_path_factory, form, parts):
    path = tmp_path_factory.mktemp("small") / "a.txt"
    text = "".join(parts)
    if form == "jsonl":
        text = "".join(json.dumps({"text": line}) + "\n\n" for line in text.split("\n"))
    if form == "pairs":
        text = "".join(f"{line}\t{line}\n" for line in text.split())
    path.write_bytes(text.encode() or b" ")
    _, ((segment,),) = readers.plan(PrepareConfig(input=[str(path)], source=SourceConfig(format=form)))
    assert segment.file.is_small
    assert list(readers.read_segment(segment, path.read_bytes())) == list(readers.read([segment]))


@settings(max_examples=150)
@given(
    parts=st.lists(
        st.sampled_from(["ab", "c d", "é中", "\n", "\n\n", "\r\n\r\n", " ", "\n \n", "x" * 40]), max_size=40
    ),
    segment=st.integers(1, 60),
    block=st.integers(1, 30),
)
@pytest.mark.parametrize("form", ["text", "documents", "jsonl"])
def test_documents_do_not_depend_on_where_a_file_is_cut(tmp_path_factory, form, parts, segment, block):
    folder = tmp_path_factory.mktemp("cuts")
    text = "".join(parts)
    if form == "jsonl":
        text = "".join(json.dumps({"text": line}) + "\n" for line in text.split("\n"))
    (folder / "a.txt").write_bytes(text.encode() or b" ")
    (folder / "a.txt.gz").write_bytes(gzip.compress(text.encode() or b" "))
    whole = read([folder / "a.txt"], format=form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_SEGMENT_BYTES", (segment, segment))
        patch.setattr(readers, "_STRIPE_BYTES", 8)
        patch.setattr(files, "BLOCK_BYTES", block)
        cut = read([folder / "a.txt"], format=form)
        striped = read([folder / "a.txt.gz"], format=form)
    assert [(d.order, d.text.split()) for d in cut] == [(d.order, d.text.split()) for d in whole]
    assert sorted((d.order, d.text.split()) for d in striped) == [(d.order, d.text.split()) for d in whole]


@settings(max_examples=50)
@given(
    parts=st.lists(
        st.sampled_from(["ab", "é中", "\n", "\n", "\r\n", "\n\n", " " * 9, " " * 70, "\t" * 150, "xy " * 30]),
        max_size=25,
    ),
    segment=st.integers(20, 120),
    block=st.integers(5, 40),
    piece=st.integers(8, 40),
)
@pytest.mark.parametrize("form", ["text", "documents"])
def test_white_space_of_any_length_divides_documents_alike(tmp_path_factory, form, parts, segment, block, piece):
    """White space longer than what is held of a file, across the ends of blocks and segments."""
    path = tmp_path_factory.mktemp("blank") / "a.txt"
    text = "".join(parts).encode() or b" "
    path.write_bytes(text)
    separator = rb"\n[ \t\r]*\n" if form == "text" else rb"\n"
    expected = [words for document in re.split(separator, text) if (words := document.split())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_SEGMENT_BYTES", (segment, segment))
        patch.setattr(files, "BLOCK_BYTES", block)
        patch.setattr(lines, "LONGEST_PIECE", piece)
        documents: list[tuple[int, bytes]] = []
        for document in read([path], format=form):
            if document.piece > 1:
                documents[-1] = (documents[-1][0], documents[-1][1] + document.text)
            else:
                documents.append((document.order, document.text))
    assert [joined.split() for _, joined in documents] == expected
    places = [place for place, _ in documents]
    assert places == sorted(set(places)) and all(
        text[place:].startswith(words[0][:1]) for place, words in zip(places, expected, strict=True)
    )


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path):
    for name in ("b/2.txt", "a/10.txt", "a/9.txt", "c.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    (tmp_path / ".hidden").write_text("no")
    shuffled = [tmp_path / "c.jsonl", tmp_path / "b", tmp_path / "a" / "*.txt", tmp_path / "a/9.txt"]
    assert texts([tmp_path]) == texts(shuffled) == ["a/10.txt", "a/9.txt", "b/2.txt", "c.jsonl"]


def test_a_link_is_read_as_its_own_name_says(tmp_path):
    """The cache of the Hugging Face hub: names that link to files named by hashes."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snap").mkdir()
    compress(tmp_path / "made.gz", json.dumps({"text": "ka lo"}).encode())
    (tmp_path / "made.gz").rename(tmp_path / "blobs/abc123")
    (tmp_path / "snap/d.jsonl.gz").symlink_to("../blobs/abc123")
    (tmp_path / "snap/e.jsonl.gz").symlink_to("d.jsonl.gz")
    (tmp_path / "link").symlink_to("snap")
    for entry in ("snap", "link", "link/../snap/*"):
        found, _ = readers.plan(PrepareConfig(input=[str(tmp_path / entry)]))
        assert [(file.name, file.format, file.compression) for file in found] == [("d.jsonl.gz", "jsonl", "gzip")]
        assert texts([tmp_path / entry]) == ["ka lo"]


def test_folders_are_read_without_what_is_hidden_or_written_by_runs(tmp_path):
    for name in (
        ".git/config",
        "a.txt",
        "b/.ipynb_checkpoints/x.txt",
        "b/c/d.txt",
        "runs/data/tokenizer/vocab.txt",
        "runs/data/.work/tokenizer/vocab.txt",
        "runs/vocab/vocab.txt",
    ):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)

    def names(entry: str, **folders: str) -> list[str]:
        folders = {field: str(tmp_path / "in" / folder) for field, folder in folders.items()}
        found, _ = readers.plan(PrepareConfig(input=[str(tmp_path / "in" / entry)], **folders))
        return [Path(file.path).relative_to(tmp_path / "in").as_posix() for file in found]

    for entry in ("", "*", "**"):
        assert names(entry, output="runs/data", tokenizer="runs/vocab") == ["a.txt", "b/c/d.txt"]
        assert names(entry, output="runs/data", tokenizer="runs/vocab/vocab.txt") == ["a.txt", "b/c/d.txt"]
        assert names(entry, output="runs") == ["a.txt", "b/c/d.txt"]
    assert names("runs/vocab", output="runs") == ["runs/vocab/vocab.txt"]  # named, so meant
    assert names(".git") == [".git/config"]


def test_pairs(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"Welcome to the\tthe jungle\r\n\nI can stay\there all night")
    assert texts([tmp_path], format="pairs") == ["Welcome to the\tthe jungle", "I can stay\there all night"]
    (tmp_path / "p.txt").write_bytes(b"a\tb\nno tab\n")
    with pytest.raises(UserError, match="byte 4: found 0 tabs"):
        read([tmp_path], format="pairs")


def test_parquet_fields_and_row_groups(tmp_path):
    made = corpus.documents(50)
    table = pa.table({"body": made, "name": [f"n{i}" for i in range(50)], "extra": list(range(50))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    found = read([tmp_path], text_field="body", id_field="name")
    assert [d.text.decode() for d in found] == made and [d.id for d in found] == [f"n{i}" for i in range(50)]
    with pytest.raises(UserError, match="'text', there are 'body', 'name', 'extra'"):
        read([tmp_path])


@pytest.mark.parametrize(
    ("flipped", "said"),
    [(flipped_page_heads, "rows, expected 12, as its footer says"), (flipped_footers, "row groups by its footer")],
)
def test_a_flipped_bit_of_parquet_that_no_checksum_covers_loses_no_document(tmp_path, flipped, said):
    refused = 0
    for whole in flipped(tmp_path / "a.parquet"):
        try:
            assert [d.text.decode() for d in read([tmp_path])] == whole
        except UserError as error:
            refused += said in str(error)
    assert refused > 4


def test_texts_of_tables_of_every_kind(tmp_path, monkeypatch):
    made = [*corpus.documents(5), None, "é" * 3000]
    kinds = pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.json_()
    for kind in kinds:
        parquet.write_table(pa.table({"text": pa.array(made, pa.string()).cast(kind)}), tmp_path / "a.parquet")
        assert [d.text.decode() for d in read([tmp_path])] == [text or "" for text in made]
    with monkeypatch.context() as patch:
        patch.setattr(lines, "LONGEST_PIECE", 1001)  # in the middle of a letter
        pieces = [d for d in read([tmp_path]) if d.text.startswith("é".encode())]
        assert b"".join(d.text for d in pieces).decode() == made[-1] and [d.piece for d in pieces] == [1, 2, 3, 4, 5, 6]
        patch.setattr(columns, "_LONGEST_TEXT", 5999)
        with pytest.raises(UserError, match="a.parquet: row 6: text: found 0 MB in one row, expected"):
            read([tmp_path])
    parquet.write_table(pa.table({"text": [3]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="text: found int64, expected a string"):
        read([tmp_path])


def test_a_table_whose_text_is_no_utf8_stops_or_is_replaced(tmp_path):
    made = pa.array([b"good", b"b\xffd"]).view(pa.string())  # Arrow does not look
    parquet.write_table(pa.table({"text": made}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet: row 1: found byte 0xff, expected UTF-8"):
        read([tmp_path])
    found = read([tmp_path], encoding_errors="replace")
    assert [(d.text.decode(), d.damaged) for d in found] == [("good", False), ("b\ufffdd", True)]


def test_saved_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    made = corpus.documents(30)
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": made})})
    saved.save_to_disk(tmp_path / "saved")
    assert texts([tmp_path / "saved"], format="dataset") == made
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for entry in ("saved", "~/saved"):
        found, _ = readers.plan(PrepareConfig(input=[entry], source=SourceConfig(format="dataset")))
        assert [(file.path, file.name) for file in found] == [(str(tmp_path / "saved"), "saved")]
    with pytest.raises(UserError, match="found no 'test'"):
        read([tmp_path / "saved"], format="dataset", dataset_split="test")


def test_a_long_document_arrives_in_bounded_pieces_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_PIECE", 1000)
    monkeypatch.setattr(files, "BLOCK_BYTES", 300)
    words = [f"w{n}é" for n in range(2000)]
    text = "first\n\n" + " ".join(words) + "\n\nlast"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = read([tmp_path / "a.txt"])
    assert " ".join(d.text.decode() for d in found).split() == text.split()
    assert [d.piece for d in found] == [0, *range(1, len(found) - 1), 0] and len(found) > 12
    assert max(len(d.text) for d in found) <= 1400
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": " ".join(words)}) + "\n")
    found = read([tmp_path / "b.jsonl"])
    assert "".join(d.text.decode() for d in found).split() == words and max(len(d.text) for d in found) <= 1000
    (tmp_path / "c.txt").write_text("中" * 5000, encoding="utf-8")  # no white space to cut at
    assert "".join(d.text.decode() for d in read([tmp_path / "c.txt"])) == "中" * 5000


@pytest.mark.parametrize("form", ["jsonl", "text", "lines"])
def test_nothing_is_lost_around_long_documents_at_the_end_of_a_segment(tmp_path, monkeypatch, form):
    """Segments end off the grid of blocks; before and between long documents stand short ones."""
    lengths = [5, 30, 1500, 40, 900, 7, 7, 2500, 3, 60, 1200, 12] * 2
    texts_in = [f"d{n} " + "ka " * (length // 3) for n, length in enumerate(lengths)]
    if form == "jsonl":
        (tmp_path / "a").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_in))
    else:
        (tmp_path / "a").write_text("\n\n".join(texts_in))
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 400)
    monkeypatch.setattr(lines, "LONGEST_PIECE", 400)
    monkeypatch.setattr(files, "BLOCK_BYTES", 128)
    for segment in (150, 1001, 2500):
        monkeypatch.setattr(readers, "_SEGMENT_BYTES", (segment, segment))
        found = read([tmp_path / "a"], format=form)
        assert " ".join(document.text.decode() for document in found).split() == " ".join(texts_in).split()
        begun = [(document.text.split()[0].decode(), document.piece) for document in found if document.piece <= 1]
        assert [name for name, _ in begun] == [f"d{n}" for n in range(len(texts_in))]
        assert all(piece == (length > 800) for (_, piece), length in zip(begun, lengths, strict=True))


def test_the_text_of_a_long_line_is_whole_whatever_stands_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 500)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    text = "first é " + "x " * 2000 + "last"
    for before in (b"", b'"\xc3\xa9": "\xf0\x9f\x98\x80", ', b'"a": "\xff\xfe\xe9", '):
        (tmp_path / "a.jsonl").write_bytes(b"{" + before + b'"text": "' + text.encode() + b'"}\n')
        assert texts([tmp_path], encoding_errors="replace") == [text]


@pytest.mark.parametrize("spaces", [9, 2000])
def test_json_has_no_white_space_but_its_own_before_a_long_line_either(tmp_path, monkeypatch, spaces):
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 500)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    for blank in ("\t", "\r", "\v", "\f"):
        (tmp_path / "a.jsonl").write_text(f'{blank}{" " * spaces}{{"text": "the cat"}}\n', newline="")
        if blank in "\t\r":
            assert texts([tmp_path]) == ["the cat"]
        else:
            with pytest.raises(UserError, match="a.jsonl: .*(isn't JSON|besides the strings)"):
                texts([tmp_path])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("form", ["text", "lines", "documents", "file", "pairs", "jsonl"])
@pytest.mark.parametrize("letters", ["w", "\u0434"])  # those of Cyrillic are two bytes that are letters of ASCII too
def test_text_of_another_encoding_is_refused(tmp_path, encoding, form, letters):
    """With a byte order mark or without; its blank lines are no two line feeds, so that a file was one document."""
    word = letters * 3
    written = {"pairs": f"{word}\t{word}", "jsonl": f'{{"text": "{word}"}}'}.get(form, f"{word} {word}\n")
    (tmp_path / "a.txt").write_bytes("\n".join([written] * 9).encode(encoding))
    with pytest.raises(UserError, match=r"a.txt: byte \d+: found byte 0x.., (as of UTF-16, )?expected UTF-8; convert"):
        read([tmp_path], format=form)


def shrunk(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    """By other content of the same size, with the old time."""
    status = path.stat()
    time.sleep(0.02)  # the clock of a file system may have ticks of ten milliseconds
    path.write_bytes(path.read_bytes().swapcase() if path.suffix == ".txt" else path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [shrunk, replaced])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, name, change):
    """And not what is wrong with its new end, as half a line; a mapped file that shrinks would end the process."""
    path, made = tmp_path / name, [f"{number} {'w ' * 5000}" for number in range(600)]
    if name == "a.txt":
        path.write_text("\n\n".join(made))
    elif name == "a.parquet":
        options = {"row_group_size": 300, "compression": "none", "use_dictionary": False}
        parquet.write_table(pa.table({"text": made}), path, **options)
    else:
        made = [random.Random(text).randbytes(5000).hex() for text in made]  # which compression does not make small
        corpus.write_jsonl(path, made)
    config = PrepareConfig(input=[str(path)])
    _, tasks = readers.plan(config)
    found = readers.read(tasks[0])
    next(found)
    change(path)
    with pytest.raises(UserError, match=f"{name}: changed while it was read, expected a file at rest; run the same"):
        list(found)


def test_zero_bytes_stop_or_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n\nb\0d\n\nmore")
    with pytest.raises(UserError, match="a.txt: byte 7: found byte 0x00, as of UTF-16, expected UTF-8; convert"):
        read([tmp_path])
    found = read([tmp_path], encoding_errors="replace")
    assert [d.text.decode().strip() for d in found] == ["good", "b\ufffdd", "more"]
    assert [d.damaged for d in found] == [False, True, False]
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\u0000b"}\n')
    assert read([tmp_path])[0].text == b"a\0b"  # written as a letter of the text


def test_encoding_errors_stop_or_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n\nb\xffd\n\nmore")
    with pytest.raises(UserError, match="byte 7: found byte 0xff"):
        read([tmp_path])
    found = read([tmp_path], encoding_errors="replace")
    assert [d.text.decode().strip() for d in found] == ["good", "b\ufffdd", "more"]
    assert [d.damaged for d in found] == [False, True, False]
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n')
    with pytest.raises(UserError, match="lone surrogate"):
        read([tmp_path])
    assert read([tmp_path], encoding_errors="replace")[0].text.decode() == "a\ufffdb"


@pytest.mark.parametrize("size", [50, 3000])
def test_bytes_around_the_text_of_a_line_that_are_no_utf8_count_whatever_its_length(tmp_path, monkeypatch, size):
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 500)
    monkeypatch.setattr(lines, "LONGEST_PIECE", 1000)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    text = "é " * (size // 3)  # characters lie across blocks
    for record in (b'{"a": "\xff", "text": "%s"}', b'{"text": "%s", "a": "\xff"}', b'{"text": "", "b": "%s\xc3"}'):
        line = record % text.encode()
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "last"}\n')
        bad = re.search(b'\xff|\xc3(?=")', line)
        with pytest.raises(UserError, match=f"a.jsonl: byte {18 + bad.start()}: found byte 0x{bad[0].hex()}, expected"):
            read([tmp_path])
        found = read([tmp_path], encoding_errors="replace")
        assert "".join(d.text.decode() for d in found[1:-1]) == (text if b'""' not in record else "")
        assert sum(d.damaged for d in found) == 1 and sum(d.piece <= 1 for d in found) == 3
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text, "a": text}, ensure_ascii=False), encoding="utf-8")
    assert texts([tmp_path])[0].startswith("é é") and not any(d.damaged for d in read([tmp_path]))


def test_a_flipped_byte_of_a_parquet_page_with_a_checksum_is_an_error(tmp_path):
    path, made = tmp_path / "a.parquet", ["a text that is long enough " + str(number) for number in range(50)]
    parquet.write_table(
        pa.table({"text": made}), path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    assert [d.text.decode() for d in read([path])] == made
    content = bytearray(path.read_bytes())
    content[content.index(b"long enough 7")] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="a.parquet: can't be read as Parquet: .*CRC checksum"):
        list(read([path]))


@pytest.mark.parametrize("number", [-1, -2, 2**31 - 1])
def test_a_number_of_no_value_of_a_parquet_dictionary_is_an_error(tmp_path, number):
    """Arrow reads what lies before its memory."""
    path = tmp_path / "a.parquet"
    write_numbers(path, [f"text {each % 7}" for each in range(60)], number)
    of_ids = {"text_field": "name", "id_field": "text"}
    for fields in ({}, of_ids):
        with pytest.raises(UserError, match="a.parquet: can't be read as Parquet: .*out of bounds"):
            list(read([path], **fields))
    write_numbers(path, [f"text {each % 7}" for each in range(60)], number, nested=True)
    with pytest.raises(UserError, match="a.parquet: can't be read as Parquet: .*out of bounds"):
        list(read([path], **of_ids))


def test_a_dictionary_of_texts_that_are_no_utf_8_is_read_as_a_column_of_them(tmp_path):
    made = pa.DictionaryArray.from_arrays(
        pa.array([1, None, 0], pa.int32()), pa.array([b"a", b"caf\xe9 here"]).view(pa.string())
    )
    parquet.write_table(pa.table({"text": made}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 0: .*found byte 0xe9, expected UTF-8"):
        read([tmp_path])
    found = read([tmp_path], encoding_errors="replace")
    assert [each.text.decode() for each in found] == ["caf\ufffd here", "", "a"] and found[0].damaged


@pytest.mark.parametrize("form", ["text", "file", "jsonl", "parquet"])
def test_long_bytes_that_are_no_characters(tmp_path, monkeypatch, form):
    """Continuation bytes without a first one: nowhere in them does a character begin."""
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 500)
    monkeypatch.setattr(lines, "LONGEST_PIECE", 1000)
    monkeypatch.setattr(files, "BLOCK_BYTES", 300)
    data = b"\x80" * 6000
    if form == "parquet":
        parquet.write_table(pa.table({"text": pa.array([data]).view(pa.string())}), tmp_path / "a")
    else:
        (tmp_path / "a").write_bytes(b'{"text": "' + data + b'"}\n' if form == "jsonl" else data)
    with pytest.raises(UserError, match="found byte 0x80, expected UTF-8"):
        read([tmp_path], format=form)
    found = read([tmp_path], format=form, encoding_errors="replace")
    assert "".join(document.text.decode() for document in found) == "\ufffd" * 6000


def test_a_byte_order_mark_is_no_text(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert texts([tmp_path]) == ["hello"]
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "' + b"ka " * 500 + b'"}\n')
    assert texts([tmp_path]) == ["ka " * 499 + "ka"]
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 500)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    assert texts([tmp_path]) == ["ka " * 499 + "ka"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{oops}\n', "a.jsonl: byte 14: the line isn't JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "no field 'text', there are 'body'"),
        ("a.jsonl", b"[1]\n", "found list"),
        ("a.jsonl", b'{"text": 3}\n', "found int"),
        ("a.jsonl", b'{"text": {"a": 1, "a": 2}}\n', "text: found dict"),
        ("a.txt", b"", "only empty files"),
        ("a.txt.gz", b"no gzip", "can't be read to its end"),
        ("a.txt.xz", b"no xz", "can't be read to its end"),
        ("a.parquet", b"no parquet", "can't be read as Parquet"),
    ],
)
def test_errors_name_file_place_and_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read([tmp_path])


def test_a_file_whose_columns_or_fields_share_a_name_is_refused(tmp_path):
    twice = pa.table([["a"], ["b"], ["c"]], names=["text", "text", "id"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet: found 2 fields 'text', expected one"):
        read([tmp_path])
    parquet.write_table(twice.rename_columns(["text", "id", "id"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="found 2 fields 'id', expected one"):
        read([tmp_path], id_field="id")
    assert texts([tmp_path]) == ["a"]
    (tmp_path / "a.parquet").unlink()
    line = b'{"meta": {"text": "\\"text\\"", "text": 1}, "text": "a \\"text\\""}\n'
    (tmp_path / "a.jsonl").write_bytes(line)
    assert texts([tmp_path]) == ['a "text"']
    (tmp_path / "a.jsonl").write_bytes(line + b'{"text": "a", "text": "b"}\n')
    with pytest.raises(UserError, match=f"a.jsonl: byte {len(line)}: found 2 fields 'text', expected one"):
        read([tmp_path])


def test_missing_inputs_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        read([tmp_path / "nowhere-*.txt"])
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop"):
        read([tmp_path / "loop"])
    with pytest.raises(UserError, match="found none"):
        readers.plan(PrepareConfig())


def test_many_small_files_are_few_tasks(tmp_path):
    for number in range(300):
        (tmp_path / f"{number}.txt").write_text("text")
    _, tasks = readers.plan(PrepareConfig(input=[str(tmp_path)]))
    assert len(tasks) == 1 and len(tasks[0]) == 300


@pytest.mark.parametrize(
    ("names", "source", "said"),
    [
        (["a.txt"], {}, "a.txt: read as plain text, in which each paragraph"),
        (["a.txt", "b.log", "c.jsonl"], {}, "a.txt and 1 more files: read as plain text"),
        (["c.jsonl"], {}, None),
        (["a.txt"], {"format": "text"}, None),
        (["a.txt"], {"format": "file"}, None),
    ],
)
def test_text_known_by_its_name_alone_gets_a_note(tmp_path, names, source, said):
    """By `cloze prepare`, with what else a document could be; not where the format was given."""
    for name in names:
        (tmp_path / name).write_text('{"text": "one"}\n\ntwo\n')
    config = PrepareConfig(input=[str(tmp_path / name) for name in names], source=SourceConfig(**source))
    remark = readers.remark_on_text(readers.plan(config)[0])
    assert remark is None if said is None else remark.startswith(said) and "--source.format file" in remark


def test_files_without_a_byte_are_said(tmp_path):
    for name, content in (("a.txt", "text"), ("b.txt", ""), ("c.jsonl", "")):
        (tmp_path / name).write_text(content)
    notes: list[str] = []
    readers.plan(PrepareConfig(input=[str(tmp_path)]), notes.append)
    assert notes == ["b.txt and 1 more files: found no bytes, expected text; look whether it was copied whole"]


def test_lines_that_no_blank_line_divides_name_the_format_in_which_each_is_a_document(tmp_path):
    """By `cloze prepare`, before the error that a single document may be."""
    (tmp_path / "a.txt").write_text("One sentence. Another one.\nA second line.\n\n")
    config = corpus.config(tmp_path, [tmp_path / "a.txt"], source=SourceConfig(format="lines"))
    notes, progress = [], Progress()
    progress.note = notes.append
    with pytest.raises(UserError, match=r"found 1 document, expected at least 2.*--source.format documents"):
        prepare(config, progress)
    assert [note for note in notes if "found 1 document in all" in note and "--source.format documents" in note]
    files, _ = readers.plan(config)
    assert readers.remark_on_documents(files, 2) is None
    documents = replace(config, source=SourceConfig(format="documents"))
    assert readers.remark_on_documents(readers.plan(documents)[0], 1) is None
    assert prepare(documents).counts["sentences"] == 3, "the sentences of a line are found as those of a text"


def test_a_parquet_whose_names_are_no_text_or_without_rows_is_a_line(tmp_path):
    """Names of other columns than that of the text too; a writer that was closed without a row leaves no row group."""
    table = pa.table({"text": ["a b"], "otherwise": [1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for name in (b"text", b"otherwise"):
        (tmp_path / "a.parquet").write_bytes(content.replace(name, b"\xff" * len(name)))
        with pytest.raises(UserError, match=f"{tmp_path}/a.parquet: can't be read as Parquet: "):
            readers.plan(PrepareConfig(input=[str(tmp_path / "a.parquet")]))
    parquet.ParquetWriter(tmp_path / "a.parquet", table.schema).close()
    with pytest.raises(UserError, match="found no text in any document"):
        prepare(corpus.config(tmp_path, [tmp_path / "a.parquet"]))
