"""Places in a store: what is written, read, listed; repetitions and their limit; what is said of mistakes."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cloze.launch.run.commits import read_commits
from cloze.launch.run.stored_run import fetch_objects, keys_below
from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install
from cloze.pipeline.storage import remove_leftovers, remove_tree
from cloze.pipeline.stores import clients, places, reading
from cloze.pipeline.stores.clients import NotAllowed
from cloze.pipeline.stores.places import StorePath, to_place
from cloze.pipeline.stores.reading import open_raw
from tests.stores.server import BUSY, first, slow


def test_objects_are_written_listed_read_and_removed(bucket, tmp_path):
    folder = to_place(bucket) / "a folder/ünter"
    (tmp_path / "file").write_bytes(bytes(range(256)) * 100)
    (folder / "one").write(b"first")
    (folder / "deep/two").write(tmp_path / "file")
    (to_place(bucket) / "a folder/ünterwegs").write(b"")
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "one"]
    assert folder.client.folders(folder.key) == ["deep"] and folder.client.folders("") == ["a folder"]
    assert [(each.key, each.size) for each in folder.objects()] == [
        ("a folder/ünter/deep/two", 25600),
        ("a folder/ünter/one", 5),
    ]
    assert (folder / "one").read_text() == "first" and (folder / "one").stat().st_size == 5
    assert (folder / "deep/two").read_range(254, 260) == bytes([254, 255, 0, 1, 2, 3])
    assert folder.is_dir() and not folder.is_file() and (folder / "one").is_file() and not (folder / "one").is_dir()
    (folder / "one").unlink()
    (folder / "one").unlink()
    assert not (folder / "one").is_file() and (folder / "deep").is_dir()
    with pytest.raises(FileNotFoundError, match="one"):
        (folder / "one").read_bytes()


def test_an_object_is_read_at_once_within_the_bound_of_files(bucket, tmp_path, monkeypatch):
    """None of its bytes otherwise; what may be larger, as weights, is copied in pieces."""
    place = to_place(bucket) / "run"
    (place / "model/weights").write(b"0123456789" * 10)
    (place / "commits.json").write(b"x" * 100)
    monkeypatch.setattr(places, "MOST_BYTES", 99)
    for read in (read_commits, StorePath.read_bytes, StorePath.read_text):
        with pytest.raises(UserError, match="^s3://.*/commits.json: found 100 bytes, expected at most 99"):
            read(place / "commits.json")
    monkeypatch.setattr("cloze.launch.run.stored_run._PIECE_BYTES", 7)
    fetch_objects(place, ["model/weights", "none"], tmp_path)
    assert (tmp_path / "model/weights").read_bytes() == b"0123456789" * 10 and not (tmp_path / "none").exists()
    monkeypatch.setattr(places, "MOST_BYTES", 100)
    assert (place / "commits.json").read_bytes() == b"x" * 100


def test_a_write_may_depend_on_what_is_there(bucket):
    path = to_place(bucket) / "lock"
    version = path.client.write_if("lock", b"1", None)
    assert version and path.client.write_if("lock", b"2", None) is None and path.read_bytes() == b"1"
    after = path.client.write_if("lock", b"3", version)
    assert after and path.client.write_if("lock", b"4", version) is None and path.read_bytes() == b"3"
    path.unlink()
    assert path.client.write_if("lock", b"5", after) is None and not path.is_file()


@pytest.mark.parametrize("kind", ["versions", "empty ones first", "no token"])
def test_a_listing_that_ends_early_is_an_error(bucket, proxy, monkeypatch, kind):
    """Of a server that knows only the first version of listings, or gives no token for what follows."""
    monkeypatch.setattr(clients, "_FEWEST_OF_A_PAGE", 5)
    place = to_place(bucket) / "in"
    for number in range(12):
        (place / f"{number:02}" / "x").write(b"1" if kind != "empty ones first" or number > 5 else b"")
    whole = proxy.passed_on

    def ending_early(request, body):
        if "list-type=2" not in request.path:
            return whole(request, body)
        left_out = "$^" if kind == "no token" else "list-type=2|continuation-token=[^&]*|start-after=[^&]*"
        path = re.sub(f"&?({left_out})", "", request.path).replace("?&", "?")
        status, headers, content = whole(dataclasses.replace(request, path=f"{path}&max-keys=5"), body)
        content = re.sub(rb"<NextContinuationToken>.*?</NextContinuationToken>", b"", content)
        return status, headers | {"Content-Length": str(len(content))}, content

    assert len([*place.objects()]) == len([*place.iterdir()]) == 12
    monkeypatch.setattr(proxy, "passed_on", ending_early)
    for listing in (place.objects, place.iterdir, lambda: place.client.folders(place.key)):
        with pytest.raises(UserError, match=r"in: found (5|12) objects in a listing and, asked for what follows, some"):
            [*listing()]


@pytest.mark.parametrize("content", [b"1", b""])
def test_a_listing_that_begins_anew_has_an_end(bucket, proxy, monkeypatch, content):
    """As where something between drops the token of what follows."""
    place, whole = to_place(bucket) / "in", proxy.passed_on
    for number in range(6):
        (place / f"{number}").write(content)

    def beginning_anew(request, body):
        path = re.sub("&?continuation-token=[^&]*", "", request.path).replace("?&", "?")
        return whole(dataclasses.replace(request, path=f"{path}&max-keys=5" if "list-type=2" in path else path), body)

    monkeypatch.setattr(proxy, "passed_on", beginning_anew)
    with pytest.raises(UserError, match="in: found 5 objects in a listing and, asked for what follows, some again"):
        [*place.objects()]


def test_one_who_may_list_a_part_of_a_bucket_works_there(bucket, proxy):
    place = to_place(bucket) / "mine"
    (place / "there").write(b"1")

    def forbidden(request):
        listed = "list-type=2" in request.path and "prefix=mine" not in request.path
        return (lambda _: (403, {"Content-Length": "0"}, b"")) if listed else None

    proxy.fault = forbidden
    assert not (place / "missing").is_file() and (place / "there").is_file() and place.is_dir()
    with pytest.raises(NotAllowed, match="the store refused the request"):
        (to_place(bucket) / "yours").is_dir()


def test_a_run_at_the_root_of_a_bucket_has_the_names_of_any_other(bucket):
    """The first letter of each was cut off, so that its model was not found."""
    place = to_place(bucket)
    (place / "model/config.json").write(b"{}")
    while place.key:
        place = place.parent
    assert keys_below(place, to_place(bucket).key or "model")[0].endswith("model/config.json")
    assert (place / keys_below(place, to_place(bucket).key or "model")[0]).is_file()


def test_what_may_not_be_deleted_stays_and_is_said(bucket, proxy, monkeypatch):
    place, whole = to_place(bucket) / "in", proxy.passed_on
    (place / "there").write(b"1")

    def refusing(request, body):
        return (403, {"Content-Length": "0"}, b"") if request.method in ("DELETE", "POST") else whole(request, body)

    monkeypatch.setattr(proxy, "passed_on", refusing)
    assert not remove_tree(place) and (place / "there").is_file()
    (place / ".tmp-left").write(b"1")
    remove_leftovers(place)  # nobody reads them
    monkeypatch.setattr(proxy, "passed_on", whole)
    assert remove_tree(place)


@pytest.mark.parametrize("status", [409, 412])
def test_a_refusal_without_a_condition_is_one_line(bucket, proxy, status):
    """As of an archived or leased blob of Azure."""
    path = to_place(bucket) / "x"
    path.write(b"1")
    proxy.fault = lambda request: lambda _: (status, {"Content-Length": "0"}, b"")
    for ask in (path.read_bytes, path.info, lambda: path.write(b"2")):
        with pytest.raises(UserError, match=rf"x: the store refused the request \({status} "):
            ask()


def halved(answer):
    return answer[2][: len(answer[2]) // 2] or None


late = slow(0.3)


@pytest.mark.parametrize(
    "change", [lambda _: BUSY, lambda _: None, halved, late], ids=["busy", "cut", "cut in the body", "slow"]
)
def test_faults_that_pass_are_not_seen(proxy, bucket, change, monkeypatch):
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.01)
    clients.open_client.cache_clear()
    content = bytes(range(256)) * 1000
    proxy.fault = first(2, change)
    path = to_place(bucket) / "x"
    path.write(content)
    assert path.read_bytes() == content and path.read_range(10, 70000) == content[10:70000]
    assert [each.size for each in to_place(bucket).objects()] == [len(content)]
    repeated = sum(request.number > 0 for request in proxy.requests)
    assert repeated >= 2 or change is late  # it had to be asked again


def test_what_changes_on_its_way_is_sent_again(proxy, bucket, monkeypatch):
    """The store compares what arrives with the SHA-256 that came with it, also of a condition; without where it is
    told so, as AWS's own tools are."""
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.01)
    clients.open_client.cache_clear()
    sent: list[bytes] = []

    def damage(request, body: bytes) -> bytes:
        sent.append(body)
        return body[:-1] + b"!" if sent.count(body) == 1 else body

    proxy.damage = damage
    path = to_place(bucket) / "part"
    path.write(b"what was trained")
    version = path.writer.write_if(path.key, b"what comes next", path.info().version)
    assert version is not None and path.read_bytes() == b"what comes next"
    assert sent.count(b"what was trained") == sent.count(b"what comes next") == 2
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    clients.open_client.cache_clear()
    (to_place(bucket) / "part").write(b"again")
    assert path.read_bytes() == b"agai!"


def flipped(answer):
    """With another bit in the middle, and the same length and headers."""
    status, headers, content = answer
    place = len(content) // 2
    return status, headers, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def shortened(answer):
    """Cut, with the length of what is left."""
    status, headers, content = answer
    return status, headers | {"Content-Length": "20"}, content[:20]


@pytest.mark.parametrize("change", [flipped, shortened])
def test_other_bytes_over_http_are_asked_for_again(proxy, bucket, impatient, change):
    content = b"a small object of text\n" * 9
    path = to_place(bucket) / "x"
    path.write(content)
    proxy.fault = first(2, change)
    assert path.read_bytes() == content
    proxy.fault = lambda request: change
    with pytest.raises(
        UserError, match=r"/x: found other bytes than its ETag [0-9a-f]+ has, in each of 5 answers, exp"
    ):
        path.read_bytes()


@pytest.mark.parametrize(
    ("tag", "validation"), [(None, None), ("0123456789abcdef-2", None), ("0123456789abcdef" * 2, "when_required")]
)
def test_input_over_http_without_an_md5_is_read_twice(proxy, bucket, impatient, monkeypatch, tag, validation):
    """A part of an object; one that was written in several requests; one of a store that encrypts (SSE-KMS), whose
    ETags only look like an MD5."""
    content = bytes(range(256)) * 100
    path = to_place(bucket) / "x"
    path.write(content)
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", validation or "when_supported")
    clients.open_client.cache_clear()
    if tag is None:
        monkeypatch.setattr(reading, "_AHEAD", 4096)

    def other_tag(answer):
        status, headers, content = answer
        return (
            status,
            {name: tag if tag and name.lower() == "etag" else value for name, value in headers.items()},
            content,
        )

    for wrong in (1, 2):  # the first answer, the second
        counted = itertools.count(1)

        def fault(request, counted=counted, wrong=wrong):
            if request.method == "GET" and next(counted) == wrong:
                return lambda answer: flipped(other_tag(answer))
            return other_tag

        proxy.fault = fault
        reading.scratch_cache.cache_clear()
        with open_raw(str(path)) as file:
            assert file.read(4096) == content[:4096]
        assert next(counted) == 5  # twice, and twice again
    proxy.fault = lambda request: lambda answer: other_tag(answer) if request.number % 2 else flipped(other_tag(answer))
    reading.scratch_cache.cache_clear()
    with (
        open_raw(str(path)) as file,
        pytest.raises(UserError, match="/x: found other bytes than a second answer has, "),
    ):
        file.read(4096)


def test_encrypted_answers_are_read_once(bucket, monkeypatch):
    made = clients.ObjectClient("s3://x", to_place(bucket).client._store)
    made.write("x", b"content")
    tags = []
    monkeypatch.setattr(clients.hashlib, "md5", lambda *_, **__: tags.append(1))
    assert made.read("x", checked=True) == b"content" and made.read("x", 1, 3, checked=True) == b"on" and not tags


def test_the_limit_is_one_line(proxy, bucket, impatient):
    path = to_place(bucket) / "x"
    path.write(b"some content")
    proxy.requests.clear()
    proxy.fault = lambda request: lambda _: BUSY
    with pytest.raises(
        UserError,
        match=r"^s3://bucket-\d+/x: the store didn't answer as expected \(503 Service "
        r"Unavailable\), also not after up to 2 retries .*run the same command again$",
    ):
        path.read_bytes()
    assert len(proxy.requests) == 3
    proxy.fault = lambda request: halved
    with pytest.raises(UserError, match="the connection was cut|the answer ended after"):
        path.read_bytes()


def test_a_file_to_write_that_is_gone_is_named_itself(bucket, tmp_path):
    """By the library's own error it was the store that lacks it."""
    with pytest.raises(FileNotFoundError) as error:
        (to_place(bucket) / "x").write(tmp_path / "gone")
    assert error.value.filename == str(tmp_path / "gone")


def test_no_server_no_bucket_no_credentials(bucket, impatient, monkeypatch):
    for ask in (lambda path: path.read_bytes(), lambda path: path.write(b""), lambda path: list(path.iterdir())):
        with pytest.raises(UserError, match="^s3://nowhere: found no such bucket, expected an existing one") as told:
            ask(to_place("s3://nowhere/x"))
        assert "\n" not in str(told.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    clients.open_client.cache_clear()
    with pytest.raises(UserError, match=r"/x: the store didn't answer as expected \(no connection\)"):
        (to_place(bucket) / "x").read_bytes()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    clients.open_client.cache_clear()
    with pytest.raises(UserError, match=r"^s3://bucket-\d+: found no credentials, expected some in AWS_ACCESS_KEY_ID"):
        (to_place(bucket) / "x").read_bytes()


def test_credentials_and_endpoint_of_a_profile(bucket, server_port, monkeypatch, tmp_path):
    (to_place(bucket) / "x").write(b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = A\naws_secret_access_key = B\n")
    (tmp_path / "config").write_text(
        f"[profile mine]\nregion = us-east-1\nendpoint_url = http://127.0.0.1:{server_port}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    clients.open_client.cache_clear()
    assert (to_place(bucket) / "x").read_bytes() == b"1"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    clients.open_client.cache_clear()
    with pytest.raises(UserError, match="nobody"):
        (to_place(bucket) / "x").read_bytes()


def test_credentials_that_expire_are_asked_for_again(proxy, bucket, monkeypatch, tmp_path):
    """The process of a profile gives new ones each time, valid for a second; each request is signed with the newest."""
    script = tmp_path / "credentials.py"
    script.write_text(
        "import datetime, json, os\n"
        f"path = {str(tmp_path / 'count')!r}\n"
        "count = 1 + (int(open(path).read()) if os.path.exists(path) else 0)\n"
        "open(path, 'w').write(str(count))\n"
        "end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=1)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'KEY{count}', 'SecretAccessKey': 's', 'SessionToken': 't',\n"
        "                  'Expiration': end.isoformat()}))\n"
    )
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(clients, "_CREDENTIAL_SECONDS", 0)
    clients.open_client.cache_clear()
    path = to_place(bucket) / "x"
    path.write(b"1")
    assert path.read_bytes() == b"1"
    keys = [
        request.headers["authorization"].partition("Credential=")[2].partition("/")[0] for request in proxy.requests
    ]
    assert len(set(keys)) == 2
    script.write_text("raise SystemExit(1)\n")
    with pytest.raises(UserError, match=r"^s3://bucket-\d+: the credentials can't be renewed"):
        path.read_bytes()


def test_a_missing_extra_is_said(tmp_path):
    command = (
        "import sys; sys.modules['obstore'] = None\n"
        "from cloze.launch.cli import main; sys.exit(main(['inspect', 's3://b/x']))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and how_to_install("stores") in done.stderr and done.stderr.count("\n") == 1


def test_removing_what_is_not_there_is_no_error_where_the_store_says_one(bucket):
    """As those of gs and az do; the others of a list are removed."""
    there = {"a", "c"}

    def delete(store, keys):
        for key in keys:
            if key not in there:
                raise FileNotFoundError(key)
            there.remove(key)

    client = to_place(bucket).client
    client._library = SimpleNamespace(delete=delete, exceptions=client._library.exceptions)
    try:
        client.delete(["a", "b", "c"])
        client.delete(["b"])
    finally:
        clients.open_client.cache_clear()
    assert not there
