"""`cloze vocab` and `cloze prepare` from a store into a store: the same bytes as on disk; killed, locked, refused."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from dataclasses import replace

import pytest

from cloze.launch.cli import main
from cloze.pipeline.config import PrepareConfig, SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.identity import check_ours, open_work
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.source_hashes import hash_piece
from cloze.pipeline.readers import plan, read
from cloze.pipeline.shards.manifest import WORK_FOLDER
from cloze.pipeline.storage import remove_tree
from cloze.pipeline.stores import clients, leases
from cloze.pipeline.stores.places import to_place
from cloze.pipeline.stores.reading import open_raw
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.pipeline import corpus
from tests.stores.server import BUSY, first


def contents(url: str) -> dict[str, bytes]:
    place = to_place(url)
    return {each.key[len(place.key) + 1 :]: place.at(each.key).read_bytes() for each in place.objects()}


def config(folder, bucket, **changes):
    changes = {"output": f"{bucket}/data", "tokenizer": f"{bucket}/tokenizer"} | changes
    return replace(corpus.config(folder, []), input=[f"{bucket}/in"], **changes)


def test_the_same_bytes_as_on_disk(folder, inputs):
    """The manifest too; and nothing else is left. Done again, it is done already, until an input has changed, or the
    output has lost something.
    """
    prepare(config(folder, inputs, workers=2))
    expected = corpus.contents(folder / "data")
    assert contents(f"{inputs}/data") == expected
    prepare(config(folder, inputs))
    assert contents(f"{inputs}/data") == expected
    for name, left, found in (
        ("train/shard-00000.arrow", None, r"train/shard-00000.arrow: found no such shard.*; restore it, or remove s3:"),
        ("validation/shard-00000.arrow", b"", "validation/shard-00000.arrow: damaged shard: found 0 bytes"),
        ("tokenizer/vocab.txt", None, "tokenizer/vocab.txt: found no such file"),
        ("manifest.json", None, "holds shards without their manifest.json.*; restore that file, choose another"),
    ):
        place = to_place(f"{inputs}/data/{name}")
        place.unlink() if left is None else place.write(left)
        with pytest.raises(UserError, match=rf"{inputs}/data.*{found}" if name == "manifest.json" else f"data/{found}"):
            prepare(config(folder, inputs))
        place.write(expected[name])
    assert contents(f"{inputs}/data") == expected
    content = bytearray((folder / "in/deep/b.jsonl").read_bytes())
    content[-10] ^= 1
    path = to_place(inputs) / "in/deep/b.jsonl"
    written_in_one_second(path, path.read_bytes(), bytes(content))
    with pytest.raises(UserError, match=r"prepared from other content of s3://.*/in/deep/b.jsonl"):
        prepare(config(folder, inputs))
    with pytest.raises(UserError, match="prepared with another preparation.seed"):
        prepare(config(folder, inputs, seed=1))


@pytest.fixture
def put(server_port, bucket):
    """Writes an object as other tools do, whose names know no rules."""

    def write(key: str, content: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server_port, timeout=60)
        signed = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
        path = f"/{bucket.removeprefix('s3://')}/{urllib.parse.quote(key)}"
        connection.request("PUT", path, content, {"Authorization": signed})
        assert connection.getresponse().status == 200
        connection.close()

    return write


def texts(*entries: str) -> list[bytes]:
    _, tasks = plan(PrepareConfig(input=[*entries], output="unused"))
    return [document.text for task in tasks for document in read(task)]


@pytest.mark.parametrize(
    "name", ["a?b", "what?", "a#b", "a%3Fb", "a%20b c", "[a]", "a*", "a@b:c", "a\\b", 'a{b}|^`"', "é€😀"]
)
def test_names_with_letters_that_mean_something_elsewhere(put, bucket, name):
    put(f"in/{name}.txt", b"this one")
    put("in/zz.txt", b"another")
    assert sorted(texts(f"{bucket}/in")) == sorted(texts(f"{bucket}/in/**")) == [b"another", b"this one"]
    assert texts(f"{bucket}/in/{name}.txt") == [b"this one"]


def test_a_name_with_a_query_is_read_from_its_folder(put, bucket):
    """As `wget --recursive` makes it; in a URL that a user writes it could be credentials."""
    put("in/page?id=1.txt", b"this one")
    assert texts(f"{bucket}/in") == texts(f"{bucket}/in/*.txt") == [b"this one"]
    with pytest.raises(UserError, match="found credentials or a query"):
        texts(f"{bucket}/in/page?id=1.txt")


@pytest.mark.parametrize(
    ("folder", "names"), [("", ["/a.txt", "a.txt"]), ("in", ["in/a.txt", "in/a.txt/"]), ("in", ["in/", "in/b.txt"])]
)
def test_objects_that_would_be_read_by_anothers_name_are_refused(put, bucket, folder, names):
    """Of the slash with which a name begins or ends the library says nothing; empty ones mark folders."""
    for name in names:
        put(name, b"this one")
    for number in range(49):  # the library gives 50 at once, of which the last one is the first of `names`
        put(f"{folder}/0{number:02}".lstrip("/"), b"another")
    with pytest.raises(UserError, match="found an object with content whose name begins or ends with a slash"):
        texts(f"{bucket}/{folder}".rstrip("/"))
    for name in names:
        put(name, b"" if name.endswith("/") else b"this one")
    if folder:
        assert texts(f"{bucket}/in").count(b"this one") == 1


@pytest.mark.parametrize("name", ["a//b.txt", "/a.txt", "a\tb.txt", "./b.txt", "a/../b.txt"])
def test_names_that_can_not_be_read_are_one_line(put, bucket, name):
    """And no hindrance to what is named by itself, or lies elsewhere."""
    put(f"in/{name}", b"this one")
    put("more/zz.txt", b"another")
    with pytest.raises(
        UserError, match=rf"^s3://bucket-\d+: found an object named {re.escape(repr('in/' + name))}, exp"
    ):
        texts(f"{bucket}/in")
    with pytest.raises(UserError, match="found an empty part|control character|expected a URL such as"):
        texts(f"{bucket}/in/{name}")
    assert texts(f"{bucket}/more/*.txt") == texts(f"{bucket}/more/zz.txt") == [b"another"]
    with pytest.raises(UserError, match="found nothing at"):
        texts(f"{bucket}/more/nothing.txt")


def test_folders_that_were_made_in_a_stores_console(folder, put, bucket):
    """Each has an empty object, whose name ends with a slash."""
    for name in ("in", "in/deep", "in/empty", "data"):
        put(f"{name}/", b"")
    source = folder / "in/deep/b.jsonl"
    (to_place(bucket) / "in/deep/b.jsonl").write(source)
    (to_place(bucket) / "in/nothing.txt").write(b"")
    made = prepare(config(folder, bucket, tokenizer=str(folder / "tokenizer")))
    assert [(each["name"], each["bytes"]) for each in made.sources] == [
        ("deep/b.jsonl", source.stat().st_size),
        ("nothing.txt", 0),
    ]


def test_a_worker_puts_nothing_where_another_command_has_begun(bucket):
    """As one that goes on after it was suspended for longer than its lease: it would replace the other one's shards."""
    output = to_place(bucket) / "data"
    own = open_work(output, output / WORK_FOLDER, {"preparation": {"sources": []}}, print)
    check_ours(own)
    remove_tree(output)
    with pytest.raises(UserError, match="run.json: found none, expected the one of this run"):
        check_ours(own)
    open_work(output, output / WORK_FOLDER, {"preparation": {"sources": [{}]}}, print)
    with pytest.raises(UserError, match="run.json: found that of another command, expected the one of this run"):
        check_ours(own)


def test_a_whole_listing_is_taken(put, bucket, proxy, monkeypatch):
    """The mark of a folder that comes last, and objects that are written meanwhile, are no sign of one cut short."""
    monkeypatch.setattr(clients, "_FEWEST_OF_A_PAGE", 3)
    for name in ("a", "b", "d-1", "d/"):
        put(f"in/{name}", b"1" * (name != "d/"))
    place, whole, later = to_place(f"{bucket}/in"), proxy.passed_on, itertools.count()

    def growing(request, body):
        if "start-after" in request.path:
            put(f"in/later-{next(later)}", b"1")
        return whole(request, body)

    assert [each.size for each in place.objects()] == [1, 1, 0, 1]
    monkeypatch.setattr(proxy, "passed_on", growing)
    assert len([*place.objects()]) == 5 and len([*place.iterdir()]) == 6


def test_an_object_does_not_hide_what_lies_below_its_name(put, bucket, proxy):
    """A store keeps both, as no disk does."""
    for name, text in (("both/a.txt", b"below"), ("both", b"itself"), ("empty/a.txt", b"one"), ("empty", b"")):
        put(name, text)
    for name in ("both", "both/"):
        with pytest.raises(UserError, match="found an object .*/both and others below it, expected one of both"):
            texts(f"{bucket}/{name}")
    assert texts(f"{bucket}/both/*") == [b"below"]
    assert texts(f"{bucket}/empty") == [b"one"]
    put("alone", b"an object")
    put("alone/", b"")
    assert texts(f"{bucket}/alone") == [b"an object"]

    for status in (403, 400):
        answer = status, {"Content-Length": "0"}, b""
        proxy.fault = lambda request, answer=answer: (lambda _: answer) if "list-type=2" in request.path else None
        if status == 403:  # to one who may read and not list
            assert texts(f"{bucket}/both") == [b"itself"]
        else:
            with pytest.raises(UserError, match="both: the store refused the request \\(400"):
                texts(f"{bucket}/both")


def test_the_class_of_a_tokenizer_is_looked_for_in_the_models_configuration_too(folder, inputs):
    """As in a folder on a disk: without it a Japanese model's vocab.txt would be read as BERT's."""
    (to_place(inputs) / "japanese/vocab.txt").write("\n".join([*corpus.NAMES.values(), "the"]).encode())
    (to_place(inputs) / "japanese/config.json").write(b'{"tokenizer_class": "BertJapaneseTokenizer"}')
    for given in ("japanese", "japanese/vocab.txt"):
        with pytest.raises(UserError, match="vocab.txt: found the tokenizer_class BertJapaneseTokenizer"):
            Tokenizer.from_folder(f"{inputs}/{given}")


@pytest.mark.parametrize("given", ["", "/tokenizer.json"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named_by_its_url(folder, inputs, given, name):
    (to_place(inputs) / "tokenizer" / name).write((folder / "tokenizer" / name).read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"^{inputs}/tokenizer/{name}: "):
        Tokenizer.from_folder(f"{inputs}/tokenizer{given}")


def test_what_is_no_text_is_known_by_its_name(bucket):
    """Its first bytes would be a request for each object."""
    for name in ("a.txt", "deep/b.txt", "c.PDF", "deep/d.docx"):
        (to_place(bucket) / "in" / name).write(b"text")
    with pytest.raises(UserError, match=r"found 2 of 4 files that are no text: 1 PDF \(c.PDF\), 1 Office") as error:
        plan(PrepareConfig(input=[f"{bucket}/in"]))
    glob = re.search("--input '(.*)', or", str(error.value))[1]
    source = SourceConfig(binary_files="skip")
    found = [
        plan(each)[0] for each in (PrepareConfig(input=[glob]), PrepareConfig(input=[f"{bucket}/in"], source=source))
    ]
    assert [[file.name for file in files] for files in found] == [["a.txt", "deep/b.txt"]] * 2


def written_in_one_second(path, *contents: bytes) -> None:
    """Write an object several times, of which the store's clock, which counts whole seconds, shows nothing."""
    for _ in range(20):
        times = set()
        for content in contents:
            path.write(content)
            times.add(path.info().changed)
        if len(times) == 1:
            return
    raise AssertionError("the store takes longer than a second to write")


def test_other_content_of_the_same_size_and_second(folder, inputs):
    """Is seen in a copy that this process has, while a run reads it, and when an interrupted run goes on."""
    path = to_place(inputs) / "in/deep/b.jsonl"
    before = (folder / "in/deep/b.jsonl").read_bytes()
    after = before.replace(b"e", b"f", 1)
    path.write(before)
    given = config(folder, inputs)
    files, tasks = plan(given)
    listed = next(file for file in files if file.path == str(path))
    assert (listed.size, listed.content) == (len(before), path.info().content)
    assert hash_piece(listed, 0, listed.size) == hashlib.sha256(before).hexdigest()

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("cloze.pipeline.jobs.prepare.build", interrupted)
        prepare(given)
    written_in_one_second(path, before, after)
    with open_raw(str(path)) as stream:
        assert stream.read() == after
    with pytest.raises(UserError, match="deep/b.jsonl: changed while it was read"):
        hash_piece(listed, 0, listed.size)
    with pytest.raises(UserError, match="deep/b.jsonl: changed while it was read"):
        list(read([segment for task in tasks for segment in task if segment.file == listed]))
    with pytest.raises(UserError, match="holds an interrupted run with another ETags of deep/b.jsonl; repeat"):
        prepare(given)
    path.write(before)  # written anew, but what it was
    prepare(given)
    assert contents(f"{inputs}/data") == corpus.contents(folder / "data")


def test_an_object_replaced_by_a_store_whose_clock_is_behind(folder, inputs, tmp_path):
    """By times alone it is older than the output on this machine's disk."""
    given = config(folder, inputs, output=str(tmp_path / "data"))
    prepare(given)
    path, later = to_place(inputs) / "in/deep/b.jsonl", time.time() + 120
    os.utime(tmp_path / "data/manifest.json", (later, later))
    prepare(given)
    path.write(path.read_bytes().replace(b"e", b"f", 1))
    with pytest.raises(UserError, match=r"prepared from other content of s3://.*/in/deep/b.jsonl"):
        prepare(given)


def test_vocab_prepare_verify_by_command(folder, inputs, tmp_path, capsys):
    """Globs; and the vocabulary is that of the same files on disk."""
    assert (
        main(["vocab", "--input", f"{inputs}/in/**/*.jsonl*", "--output", f"{inputs}/vocab", "--vocab_size", "300"])
        == 0
    )
    assert (
        main(["vocab", "--input", str(folder / "in"), "--output", str(tmp_path / "vocab"), "--vocab_size", "300"]) == 0
    )
    assert contents(f"{inputs}/vocab") == corpus.contents(tmp_path / "vocab")
    assert (
        main(
            [
                "prepare",
                "--input",
                f"{inputs}/in/*.gz",
                "--output",
                f"{inputs}/made",
                "--tokenizer",
                f"{inputs}/vocab/vocab.txt",
                "--max_length",
                "32",
                "--more_lengths",
                "[64]",
            ]
        )
        == 0
    )
    assert main(["verify", f"{inputs}/made"]) == 0
    told = capsys.readouterr()
    assert "all as they were written" in told.out and "a-very-secret-key" not in told.out + told.err
    assert (
        main(
            ["prepare", "--input", f"{inputs}/nothing", "--output", f"{inputs}/more", "--tokenizer", f"{inputs}/vocab"]
        )
        == 2
    )
    assert "found nothing at" in capsys.readouterr().err
    assert (
        main(
            ["prepare", "--input", f"{inputs}/in", "--output", "hf://datasets/a/b/c", "--tokenizer", f"{inputs}/vocab"]
        )
        == 2
    )
    assert capsys.readouterr().err.count("\n") == 1


def test_parquet_and_plain_text(folder, inputs, tmp_path):
    from pyarrow import parquet, table

    texts = corpus.documents(80, seed=5)
    parquet.write_table(table({"text": texts}), tmp_path / "x.parquet", row_group_size=20)
    (tmp_path / "y.txt").write_text("\n\n".join(texts[:20]))
    for name in ("x.parquet", "y.txt"):
        (to_place(inputs) / "mixed" / name).write(tmp_path / name)
    local = replace(
        corpus.config(folder, []),
        input=[str(tmp_path / "x.parquet"), str(tmp_path / "y.txt")],
        output=str(tmp_path / "data"),
    )
    prepare(local)
    prepare(replace(local, input=[f"{inputs}/mixed/*"], output=f"{inputs}/data"))
    assert contents(f"{inputs}/data") == corpus.contents(tmp_path / "data")


_KILLED = """
import sys
from cloze.pipeline.stores import leases
leases.SECONDS = 1
from cloze.launch.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_killed_in_an_upload_is_finished(folder, inputs, proxy, monkeypatch):
    """At three places: in a part, in a shard, in the manifest. Nothing but what belongs there is left."""
    arguments = [
        "--input",
        f"{inputs}/in",
        "--output",
        f"{inputs}/data",
        "--tokenizer",
        f"{inputs}/tokenizer",
        "--max_length",
        "64",
        "--mask_sets",
        "3",
        "--shards.target_tokens",
        "8192",
        "--split.validation",
        "0.1",
        "--split.test",
        "0.05",
    ]
    monkeypatch.setattr(leases, "SECONDS", 1)
    for wanted in (".part", "shard-00001.arrow", "manifest.json"):
        reached = threading.Event()

        def hold(request, wanted=wanted, reached=reached):
            if request.method == "PUT" and request.path.endswith(wanted) and not reached.is_set():
                reached.set()
                time.sleep(5)  # in which it is killed; the proxy has its bytes, the server hasn't
                return lambda _: None
            return None

        proxy.fault = hold
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, "prepare", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert reached.wait(120)
        assert f"{wanted}" and not (to_place(inputs) / "data/manifest.json").is_file()
        process.send_signal(signal.SIGKILL)
        process.wait()
    proxy.fault = lambda request: None
    notes = []
    clients.open_client.cache_clear()
    prepare(config(folder, inputs), Notes(notes))
    assert any("watching for 1 s whether it lives" in note for note in notes)
    assert contents(f"{inputs}/data") == corpus.contents(folder / "data")


class Notes:
    def __init__(self, notes: list[str]):
        self.notes = notes

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage(self, *_) -> None:
        pass

    advance = stage


def test_faults_are_not_seen_in_what_is_written(folder, inputs, proxy, monkeypatch):
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.01)
    clients.open_client.cache_clear()
    faults = iter(range(10**9))
    proxy.fault = first(1, lambda answer: BUSY if next(faults) % 2 else None)
    prepare(config(folder, inputs))
    proxy.fault = lambda request: None
    assert contents(f"{inputs}/data") == corpus.contents(folder / "data")
