"""A server on this machine that speaks as much of the Hugging Face hub's API as fetching a model needs."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.pipeline.readers.dataset_hub import Handler


@contextmanager
def serve(name: str, revisions: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders as the revisions of a model; gives the address for HF_ENDPOINT, and the paths asked for."""
    asked: list[str] = []
    handler = type("Handler", (_ModelHandler,), {"repository": name, "revisions": revisions, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


class _ModelHandler(Handler):
    revisions: dict[str, Path]
    asked: list[str]

    def _answer(self, body: bool = True) -> None:
        path, name = unquote(urlsplit(self.path).path), re.escape(self.repository)
        self.asked.append(path)
        known = {commit_of(revision): folder for revision, folder in self.revisions.items()}
        if found := re.fullmatch(rf"/{name}/resolve/([^/]+)/(.+)", path):
            self.commit, self.folder = found.group(1), known[found.group(1)]
            self._file(found.group(2), body)
        elif found := re.fullmatch(rf"/api/models/{name}(?:/revision/(.+))?", path):
            revision = found.group(1) or "main"
            if revision not in self.revisions:
                return self._missing("RevisionNotFound")
            self.folder = self.revisions[revision]
            files = [{"rfilename": str(file.relative_to(self.folder))} for file in self._files()]
            self._json(
                {"id": self.repository, "sha": commit_of(revision), "private": False, "siblings": files, "tags": []}
            )
        elif found := re.fullmatch(rf"/api/models/{name}/tree/([^/]+)/?", path):
            self.folder = known[found.group(1)]
            self._json([self._entry(file) for file in self._files()])
        else:
            self._missing("RepoNotFound")

    def _files(self) -> list[Path]:
        return sorted(file for file in self.folder.rglob("*") if file.is_file())
