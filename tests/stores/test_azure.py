"""The same in Azure's store, where its emulator is installed (npm install azurite): by name skipped elsewhere."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from email.utils import formatdate

import pytest

from cloze.launch.cli import main
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.stores import clients, leases
from cloze.pipeline.stores.leases import leased
from cloze.pipeline.stores.places import to_place
from tests.pipeline import corpus

# Of the emulator, as its documentation gives them: the same everywhere.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("no azurite-blob on the path")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--blobPort", str(port), "--silent", "--skipApiVersionCheck", "--disableTelemetry",
               "--location", str(tmp_path_factory.mktemp("azurite"))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
        process.kill()


@pytest.fixture
def container(port, monkeypatch):
    """The URL of a new container."""
    name = f"container-{time.monotonic_ns()}"
    date = formatdate(usegmt=True)
    signed = "\n".join(["PUT", *[""] * 11, f"x-ms-date:{date}", "x-ms-version:2021-08-06",
                        f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()).decode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers={
        "x-ms-date": date, "x-ms-version": "2021-08-06", "Content-Length": "0",
        "Authorization": f"SharedKey {ACCOUNT}:{signature}"})
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
    clients.open_client.cache_clear()
    yield f"az://{name}"
    clients.open_client.cache_clear()


def test_prepared_in_azure(container, tmp_path, capsys):
    source = corpus.write_jsonl(tmp_path / "in/a.jsonl.gz", corpus.documents(60, seed=1))
    local = corpus.config(tmp_path, [source])
    prepare(local)
    (to_place(container) / "in/a.jsonl.gz").write(source)
    prepare(replace(local, input=[f"{container}/in/*.gz"], output=f"{container}/data"))
    data = to_place(container) / "data"
    assert {each.key.removeprefix("data/"): data.at(each.key).read_bytes() for each in data.objects()} == (
        corpus.contents(tmp_path / "data"))
    assert main(["verify", str(data)]) == 0 and "all as they were written" in capsys.readouterr().out
    with pytest.raises(UserError, match="^az://no-such-container: found no such bucket"):
        (to_place("az://no-such-container") / "x").read_bytes()


def test_a_lease_in_azure(container, monkeypatch):
    monkeypatch.setattr(leases, "SECONDS", 1)
    path, notes = to_place(container) / "lock", []
    with leased(path, notes.append) as lease:
        with leased(path, notes.append) as other:
            assert other is None
        time.sleep(1.2)
        lease.check()
    assert not path.is_file() and len(notes) == 1
