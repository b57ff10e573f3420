"""Keys of clients."""

import asyncio

import httpx
import pytest

from cloze.launch.predict.predictor import Predictor
from cloze.launch.serve.app import build_app
from cloze.launch.serve.config import ServeConfig
from cloze.launch.serve.keys import read_keys
from cloze.pipeline.errors import UserError

KEY = "0123456789abcdef0123456789abcdef"


def test_keys_are_asked_for_before_anything_is_read(folder, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# of the web shop\n{KEY}\n\nanother-key-of-somebody\n")
    offline = Predictor.from_folder(folder)
    app = build_app(offline, ServeConfig(str(folder), host="0.0.0.0", api_key_file=str(path)))

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://the-server") as client:
            found = []
            for key in (None, f"Bearer {KEY}x", f"Basic {KEY}", "Bearer # of the web shop", "Bearer ", f"Bearer {KEY}"):
                headers = {"authorization": key} if key else {}
                for ask in (
                    client.post("/tokenize", json={"inputs": ["cat"]}, headers=headers),
                    client.get("/metrics", headers=headers),
                    client.get("/model", headers=headers),  # its labels may be nobody else's business
                ):
                    found.append((await ask).status_code)
            for name in ("/", "/health", "/ready", "/docs"):
                found.append((await client.get(name)).status_code)
            refused = await client.post("/no/such/path", json={})
            assert refused.headers["www-authenticate"] == "Bearer" and "Bearer KEY" in refused.json()["detail"]
            return found

    async def run():
        async with app.router.lifespan_context(app):
            return await statuses()

    assert asyncio.run(run()) == [401] * 15 + [200] * 7


@pytest.mark.parametrize(
    ("options", "headers", "status", "expected"),
    [
        ({}, {"host": "rebound.example:8000"}, 421, "host: found 'rebound.example:8000', expected localhost or an"),
        ({}, {"host": 'a"b\\'}, 421, "host: found 'a\"b"),
        ({}, {"host": "192.168.0.1"}, 421, "give the server keys (api_key_file)"),
        ({}, {"host": "[::1"}, 421, "host: found '[::1'"),
        (
            {},
            {"origin": "https://other.example"},
            403,
            "origin: found 'https://other.example', expected a page of this",
        ),
        ({}, {"origin": "null"}, 403, "origin: found 'null'"),
        ({}, {"host": "[::1].evil.example"}, 421, "host: found '[::1].evil.example', expected localhost or an"),
        ({}, {"host": "evil.example@localhost"}, 421, "host: found 'evil.example@localhost'"),
        ({}, {"host": "localhost:evil"}, 421, "host: found 'localhost:evil'"),
        ({}, {"origin": "http://localhost/evil"}, 403, "origin: found 'http://localhost/evil'"),
        ({}, {"origin": "javascript://localhost"}, 403, "origin: found 'javascript://localhost'"),
        ({}, {"host": "[127.0.0.1]"}, 421, "host: found '[127.0.0.1]'"),
        ({}, {"host": "[::1%lo]:8000"}, 200, None),
        ({}, {"host": "LOCALHOST:8000", "origin": "http://127.0.0.1:8000"}, 200, None),
        ({}, {"host": "[::1]:8000", "origin": "http://[::1]:8000"}, 200, None),
        (
            {"host": "0.0.0.0", "no_auth": True},
            {"host": "models.example", "origin": "https://other.example"},
            200,
            None,
        ),
    ],
)
def test_a_page_of_another_site_gets_nothing_without_a_key(offline, options, headers, status, expected):
    """A name that was made to lead to this machine (DNS rebinding) is in the header Host."""
    app = build_app(offline, ServeConfig("model", **options))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get("/health", headers=headers)

    answer = asyncio.run(ask())
    assert answer.status_code == status and (expected is None or expected in answer.json()["detail"]), answer.text


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (None, {"host": "0.0.0.0"}, "expected a file of keys; add --api_key_file FILE, or --no_auth true"),
        (None, {"host": "example.org"}, "found none for example.org, which other machines can reach"),
        ("", {}, "found no key in"),
        ("# none\n", {}, "found no key in"),
        ("short\n", {}, "found 5 characters in key 1"),
        ("  # keys of the server, one a line\n", {}, "found no key in"),
        ("\ufeff# keys of the server, by Notepad\r\n", {}, "found no key in"),
        (f"{'k' * 32}  # of team a\n", {}, "found white space in key 1"),
        ("x" * (1 << 21), {}, "found more than 1,048,576 bytes in"),
    ],
)
def test_a_server_that_others_reach_needs_keys(tmp_path, content, options, expected):
    if content is not None:
        (tmp_path / "keys").write_text(content)
        options["api_key_file"] = str(tmp_path / "keys")
    with pytest.raises(UserError, match=expected):
        read_keys(ServeConfig("model", **options))
