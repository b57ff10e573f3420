"""`cloze export --push` through the hub library, against a server here that speaks as much of the hub's API."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants

from cloze.launch.cli import main
from tests.launch.tiny_models import save_model

TOKEN = "hf_good"
COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """`server.repositories`: name -> whether it is private; `server.files`: what was committed, by path."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def _send(self, status: int, value) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (("Content-Type", "application/json"), ("Content-Length", str(len(content)))):
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def _known(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._send(401, {"error": "Invalid credentials in Authorization header"})
        return False

    def do_GET(self) -> None:
        if not self._known():
            return
        repositories = self.server.repositories
        if "/tree/main" in self.path:
            files = self.server.files.items()
            self._send(200, [{"type": "file", "path": name, "size": len(text), "oid": COMMIT} for name, text in files])
        elif self.path == "/api/whoami-v2":
            self._send(200, {"name": "me", "type": "user"})
        elif (name := re.sub(r"^/api/models/|/revision/main$|\?.*$", "", self.path)) in repositories:
            self._send(200, {"id": name, "sha": COMMIT, "private": repositories[name], "siblings": [], "tags": []})
        else:
            self._send(404, {"error": "Repository not found"})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if not self._known():
            return
        if self.path == "/api/repos/create":
            asked = json.loads(text)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if not name.startswith("me/"):
                return self._send(403, {"error": f"You don't have the rights to create a model under {name}"})
            status = 409 if name in self.server.repositories else 200
            private = asked.get("private") or asked.get("visibility") == "private"
            self.server.repositories.setdefault(name, bool(private))
            self._send(status, {"url": f"{self.server.address}/{name}", "id": name})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(text)["files"]
            ]
            self._send(200, {"files": files})
        elif "/commit/main" in self.path and not self.server.full:
            for line in map(json.loads, text.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.server.files[line["value"]["path"]]
            self._send(
                200,
                {
                    "commitUrl": f"{self.server.address}/me/tiny/commit/{COMMIT}",
                    "commitOid": COMMIT,
                    "hookOutput": "",
                    "success": True,
                },
            )
        elif self.path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        else:
            self._send(403, {"error": "Storage is full"})


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories, server.files, server.full = {}, {}, False
    server.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.address)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_folder_arrives_file_by_file_in_a_private_repository(hub, tmp_path, capsys):
    folder = save_model(tmp_path / "model")
    assert main(["export", str(folder), "--push", "me/tiny"]) == 0
    assert f"pushed to {hub.address}/me/tiny" in capsys.readouterr().out
    assert hub.repositories == {"me/tiny": True}
    written = {
        str(path.relative_to(tmp_path / "model-hf")): path.read_bytes()
        for path in (tmp_path / "model-hf").rglob("*")
        if path.is_file()
    }
    assert hub.files == written and "model.safetensors" in written
    # Again: a further commit, with which goes what an earlier export had, and nothing else. In public, if that is said.
    hub.files |= {"1_Pooling/config.json": b"{}", "special_tokens_map.json": b"{}", "figures.json": b"[]"}
    assert main(["export", str(folder), "--output", str(tmp_path / "again"), "--push", "me/tiny"]) == 0
    assert hub.files.keys() == {*written, "figures.json"}
    assert (
        main(["export", str(folder), "--output", str(tmp_path / "open"), "--push", "me/shown", "--private", "false"])
        == 0
    )
    assert hub.repositories["me/shown"] is False


def refused(command: list[str], capsys) -> str:
    capsys.readouterr()
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: push: ")
    return line


def test_a_hub_that_is_silent_is_given_up(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cloze.launch.pretrained.hub._SILENT_SECONDS", 0.2)
    monkeypatch.setattr(Hub, "do_GET", lambda self: time.sleep(3))
    folder = save_model(tmp_path / "model")
    assert "found no way to the hub as yourself (ReadTimeout" in refused(
        ["export", str(folder), "--push", "me/tiny"], capsys
    )


def test_what_hinders_it_is_one_line(hub, tmp_path, capsys, monkeypatch):
    folder, output = save_model(tmp_path / "model"), tmp_path / "model-hf"
    command = ["export", str(folder), "--push"]
    assert "expected a name on the hub" in refused([*command, "me/a/b"], capsys)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "expected a token that may write; log in by `hf auth login`" in refused([*command, "me/tiny"], capsys)
    assert not output.exists() and not hub.repositories  # before anything was made
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "expected one that is yours" in refused([*command, "others/tiny"], capsys)
    assert (output / "model.safetensors").exists() and not hub.files
    hub.repositories["me/shown"] = False
    again = ["export", str(folder), "--output"]
    assert "which everybody can read, expected a private repository; add --private false" in refused(
        [*again, str(tmp_path / "b"), "--push", "me/shown"], capsys
    )
    hub.full = True
    said = refused([*again, str(tmp_path / "c"), "--push", "me/tiny"], capsys)
    assert "me/tiny was not written" in said and f"upload it by `hf upload me/tiny {tmp_path / 'c'}`" in said
    assert not hub.files
