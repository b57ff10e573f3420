"""A server on this machine that speaks as much of the Hugging Face hub's API as streaming a data set needs."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40


@contextmanager
def serve(repository: str, folder: Path) -> Iterator[str]:
    """Serve the files of `folder` as the data set `repository`; gives the address for HF_ENDPOINT."""
    handler = type("Served", (Handler,), {"repository": repository, "folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    repository: str
    folder: Path
    commit = COMMIT
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self, body: bool = True) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        name = re.escape(self.repository)
        if found := re.fullmatch(rf"/datasets/{name}/resolve/[^/]+/(.+)", path):
            self._file(found.group(1), body)
        elif re.fullmatch(rf"/api/datasets/{name}(/revision/.+)?", path):
            self._json({"id": self.repository, "sha": COMMIT, "private": False, "siblings": [], "tags": []})
        elif found := re.fullmatch(rf"/api/datasets/{name}/tree/[^/]+/?(.*)", path):
            if not (self.folder / found.group(1)).is_dir():
                self._missing("EntryNotFound")
                return
            self._json([self._entry(entry) for entry in sorted((self.folder / found.group(1)).iterdir())])
        elif re.fullmatch(rf"/api/datasets/{name}/paths-info/.+", path):
            text = content.decode()
            wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text)["paths"]
            self._json([self._entry(self.folder / entry) for entry in wanted if (self.folder / entry).exists()])
        else:
            self._missing("RepoNotFound")

    def _entry(self, path: Path) -> dict:
        name = str(path.relative_to(self.folder))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "d" * 40, "size": 0}
        return {"type": "file", "path": name, "oid": self._digest(path), "size": path.stat().st_size}

    @staticmethod
    def _digest(path: Path) -> str:
        return hashlib.sha1(path.read_bytes()).hexdigest()

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, content) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, file: str, body: bool) -> None:
        path = self.folder / file
        if not path.is_file():
            self._missing("EntryNotFound")
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        part = data
        if wanted:
            stop = int(wanted.group(2)) + 1 if wanted.group(2) else len(data)
            part = data[int(wanted.group(1)) : stop]
        self.send_response(206 if wanted else 200)
        if wanted:
            start = int(wanted.group(1))
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
        self.send_header("ETag", f'"{self._digest(path)}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if body:
            self.wfile.write(part)
