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
from email.utils import formatdate

import pytest

from cloze.pipeline.stores import clients
from tests.stores import checks

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
    command = [
        program,
        "--blobPort",
        str(port),
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--location",
        str(tmp_path_factory.mktemp("azurite")),
    ]
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
    signed = "\n".join(
        [
            "PUT",
            *[""] * 11,
            f"x-ms-date:{date}",
            "x-ms-version:2021-08-06",
            f"/{ACCOUNT}/{ACCOUNT}/{name}",
            "restype:container",
        ]
    )
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()).decode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "PUT",
        f"/{ACCOUNT}/{name}?restype=container",
        headers={
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Content-Length": "0",
            "Authorization": f"SharedKey {ACCOUNT}:{signature}",
        },
    )
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
    clients.open_client.cache_clear()
    yield f"az://{name}"
    clients.open_client.cache_clear()


def test_prepared_in_azure(container, tmp_path, capsys):
    checks.prepared_as_on_disk(container, "az://no-such-container", tmp_path, capsys)


def test_a_lease_in_azure(container, monkeypatch):
    checks.a_lease_is_kept(container, monkeypatch)
