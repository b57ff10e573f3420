"""`cloze serve` over real HTTP: the offline model's answers under any load; limits; a stop that loses nothing."""

import asyncio
import json
import random
import re
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import pytest
import uvicorn

from cloze.launch.predict.blanks import FillMask
from cloze.launch.predict.predictor import Predictor
from cloze.launch.serve.app import build_app
from cloze.launch.serve.config import ServeConfig
from cloze.pipeline.errors import UserError
from tests.launch.serve.hostile_requests import chunked
from tests.launch.serve.serving import connect, read_meters, server, until_closed
from tests.launch.tiny_models import labels, save_model

WORDS = "the cat sat on mat sky sea is blue walking".split()


@pytest.fixture(scope="module")
def address(folder):
    with server(
        folder,
        "--max_texts",
        "8",
        "--max_characters",
        "500",
        "--max_body_bytes",
        "20000",
        "--max_tokens",
        "400",
        "--max_numbers",
        "4000",
    ) as (address, _):
        yield address


def blank(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(1, 25))
    words[rng.randrange(len(words))] = "[MASK]"
    return " ".join(words)


def assert_guesses(found: dict, expected: list, text: str) -> None:
    assert found["text"] == text
    for theirs, ours in zip(found["blanks"], expected, strict=True):
        assert [guess["probability"] for guess in theirs] == pytest.approx([g.probability for g in ours], abs=1e-5)
        assert theirs[0]["token"] == ours[0].token


def test_the_operations_are_those_of_the_command_line(address, offline):
    with httpx.Client(base_url=address) as client:

        def ask(name, **body):
            answer = client.post("/" + name, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["results"]

        texts = ["the [MASK] sat", "[MASK] is [MASK]"]
        for text, result in zip(texts, ask("fill-mask", inputs=texts, top_k=3), strict=True):
            assert_guesses(result, offline.fill_mask(text, 3), text)
        (result,) = ask("score", inputs=["the sky is blue"])
        assert result["log_probability"] == pytest.approx(offline.score("the sky is blue").log_probability, abs=1e-4)
        (result,) = ask("similarity", inputs=[{"text": "cat", "pair": "sky"}], pooling="cls")
        assert result["cosine"] == pytest.approx(offline.similarity("cat", "sky", "cls"), abs=1e-5)
        first, second = ask("embed", inputs=["cat", {"text": "cat", "pair": "sky"}], layer=1)
        assert first["vector"] == pytest.approx(offline.embed(["cat"], layer=1)[0].tolist(), abs=1e-5)
        assert second["vector"] != first["vector"] and second["pair"] == "sky"
        (result,) = ask("features", inputs=["the cat"])
        assert result["tokens"] == ["[CLS]", "the", "cat", "[SEP]"]
        (result,) = ask("attention", inputs=["the [MASK]"])
        assert result["tokens"] == ["[CLS]", "the", "[MASK]", "[SEP]"] and len(result["weights"]) == 3
        texts = ["the cat sat", "a cat on a cat"]
        found = [each for result in ask("word", inputs=texts, word="cat") for each in result["occurrences"]]
        for ours, theirs in zip(found, offline.word("cat", texts), strict=True):
            assert (ours["text"], ours["start"], ours["end"]) == (theirs.text, theirs.start, theirs.end)
            assert ours["static"] == theirs.static.tolist()
            assert ours["vector"] == pytest.approx(theirs.vector.tolist(), abs=1e-5)
            assert ours["cosine_to_static"] == pytest.approx(theirs.cosine_to_static, abs=1e-5)
        (result,) = ask("tokenize", inputs=["cat " * 60])
        assert result["tokens"] == ["[CLS]", *["cat"] * 60, "[SEP]"], "longer than the model's positions, too"
        assert client.get("/ready").json() == {"ready": True, "operations": offline.abilities()}
        paths = client.get("/openapi.json").json()["paths"]
        assert paths.keys() == {f"/{name}" for name in offline.abilities()} | {
            "/health",
            "/ready",
            "/model",
            "/metrics",
        }
        docs = client.get("/docs").text
        assert "swagger" in docs and "http://" not in docs and "https://" not in docs, "nothing from elsewhere"


@pytest.mark.parametrize(
    ("path", "content", "status", "expected"),
    [
        ("/fill-mask", {"inputs": ["no blank"]}, 422, "inputs.0: found no [MASK]"),
        ("/fill-mask", {"inputs": ["[MASK]", "  "]}, 422, "inputs.1: found an empty text"),
        ("/score", {"inputs": ["cat", "\u200b"]}, 422, r"inputs.1: found an empty text ('\u200b')"),
        ("/fill-mask", {"inputs": ["[MASK]"], "top_k": 0}, 422, "top_k: found 0"),
        ("/fill-mask", {"inputs": ["[MASK]"], "top_q": 1}, 422, "top_q: Extra inputs"),
        ("/fill-mask", {"inputs": ["[MASK]" + " cat" * 60]}, 422, "expected at most 48"),
        ("/fill-mask", {"inputs": ["[MASK]" + " " * 500]}, 422, "at most 500 characters"),
        ("/fill-mask", {"inputs": ["[MASK]"] * 9}, 422, "at most 8 items"),
        ("/fill-mask", {"inputs": []}, 422, "at least 1 item"),
        ("/score", {"inputs": ["cat " * 20]}, 422, "found more than 400 tokens to run through the model"),
        ("/embed", {"inputs": ["cat " * 46] * 8}, 200, None),  # 384 tokens
        ("/attention", {"inputs": ["cat " * 20]}, 422, "found more than 4,000 numbers to answer"),
        ("/features", {"inputs": ["cat " * 20] * 8}, 422, "found more than 4,000 numbers to answer"),
        ("/fill-mask", {"inputs": ["[MASK] " * 40] * 3, "top_k": 50}, 422, "found more than 4,000 numbers to answer"),
        ("/fill-mask", {"inputs": "[MASK]"}, 422, "valid list"),
        ("/similarity", {"inputs": ["alone"]}, 422, "inputs.0"),
        ("/embed", {"inputs": ["cat"], "layer": 4}, 422, "layer: found 4"),
        ("/fill-mask", b"{not json", 422, "body: found no valid JSON at character 2 (Expecting property name"),
        ("/embed", b'{"inputs": ["cat", "\\ud83d"]}', 422, "inputs.1"),
        ("/embed", b'{"inputs": ["cat"], "inputs": ["sky"]}', 422, "(found the field 'inputs' twice)"),
        ("/embed", b'{"inputs": [{"text": "cat", "text": "sky"}]}', 422, "(found the field 'text' twice)"),
        ("/embed", b'{"inputs": ["cat"], "layer": ' + b"9" * 5000 + b"}", 422, "(A number has too many digits)"),
        ("/embed", b'{"inputs": ' + b"[" * 1005 + b"]" * 1005 + b"}", 422, "(Values are nested too deep)"),
        ("/embed", b'{"inputs": ' + b"[" * 9000 + b"]" * 9000 + b"}", 422, "found 9,002 lists, objects and fields"),
        ("/embed", b'{"inputs": [' + b"[]," * 5000 + b"[]]}", 422, "body: found 5,004 lists, objects and fields"),
        ("/embed", {"inputs": ['[{:\\"[{:' * 5]}, 200, "vector"),
        (
            "/embed",
            b'{"inputs": [' + b'"",' * 6000 + b'""]}',
            422,
            "body: found 6,002 texts and names, expected",
        ),
        ("/embed", b'{"inputs": ["\xc0\xaf"]}', 422, "body: found bytes that are no UTF-8 text ('utf-8' codec can't"),
        ("/embed", '{"inputs": ["\u2261", [[]]]}'.encode("utf-16-le"), 422, "body: found a byte 0x00, as of UTF-16"),
        ("/embed", '{"inputs": ["cat"]}'.encode("utf-16"), 422, "body: found bytes that are no UTF-8 text"),
        ("/embed", {"inputs": ["cat"], "layer": True}, 422, "layer: Input should be a valid integer"),
        ("/embed", {"inputs": ["cat"], "layer": "1"}, 422, "layer: Input should be a valid integer"),
        ("/embed", {"inputs": ["cat"], "k" * 9000: 1, "\n": 1}, 422, "k...: Extra inputs are not permitted; ''"),
        ("/embed", {"inputs": ["cat"]} | {str(n): n for n in range(40)}, 422, "body: found 41 fields"),
        ("/embed?layer=1", {"inputs": ["cat"]}, 422, "query: found 'layer=1' in the address, expected options beside"),
        ("/fill-mask", b"x" * 20001, 413, "more than 20000 bytes"),
        ("/embed", {"inputs": [{"txt": "cat"}]}, 422, "inputs.0.text: Field required; inputs.0.txt: Extra inputs"),
        ("/embed", {"input": ["cat"]}, 422, "inputs: Field required; input: Extra inputs"),
        ("/embed", {"inputs": [5]}, 422, "inputs.0: "),
        ("/word", {"inputs": ["cat", "sky"], "word": "cat"}, 422, "inputs.1: found no 'cat' in 'sky'"),
        ("/word", {"inputs": ["cat"], "word": " "}, 422, "word: found ' ', expected a word"),
        ("/word", {"inputs": ["cat"]}, 422, "word: Field required"),
        ("/word", {"inputs": ["cat " * 40] * 2, "word": "cat"}, 422, "found more than 4,000 numbers to answer"),
        ("/tag", {"inputs": ["cat"]}, 404, "expected a model with the head for tag; its operations are"),
    ],
)
def test_bounds_and_what_cannot_be_answered(address, path, content, status, expected):
    options = {"content": content, "headers": {"content-type": "application/json"}}
    answer = httpx.post(address + path, **(options if isinstance(content, bytes) else {"json": content}))
    assert answer.status_code == status, answer.text
    assert status == 200 or expected in answer.json()["detail"], answer.text


def test_a_classifier_of_pairs_refuses_a_single_text(tmp_path):
    folder = save_model(tmp_path, "BertForSequenceClassification", **labels("no", "yes"))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"cloze_columns": {"texts": ["premise", "claim"]}}))
    model, said = Predictor.from_folder(folder), "found one text, expected two: the model was trained on pairs"
    assert len(model.classify("the cat", "the mat")) == 2
    with pytest.raises(UserError, match=rf"text 2: {said} \(premise, claim\)"):
        model.classify([("the cat", "the mat"), "the cat sat"])

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(model, ServeConfig("model")))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/classify", json={"inputs": ["the cat sat"]})

    answer = asyncio.run(ask())
    assert answer.status_code == 422 and f"inputs.0: {said}" in answer.json()["detail"], answer.text


def test_a_classifier_of_single_texts_refuses_pairs(tmp_path):
    """As a file of "id, tab, text" is: it was trained on no second segment."""
    folder = save_model(tmp_path, "BertForSequenceClassification", **labels("no", "yes"))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"cloze_columns": {"texts": ["review"]}}))
    model = Predictor.from_folder(folder)
    assert len(model.classify("the cat")) == 2
    with pytest.raises(UserError, match=r"found two texts, expected one: the model was trained on single .*review"):
        model.classify("17", "the cat sat")


def test_a_body_without_content_type_is_refused_with_the_header(address):
    body, header = b'{"inputs": ["cat"]}', "send JSON with the header content-type: application/json"
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        answer = httpx.post(f"{address}/embed", content=body, headers={"content-type": kind})
        assert answer.status_code == 422 and header in answer.json()["detail"], answer.text
    answer = httpx.post(f"{address}/embed", content=b"[]", headers={"content-type": "application/json"})
    assert answer.status_code == 422 and header not in answer.json()["detail"], answer.text


def test_every_answer_is_counted_by_its_status(offline, monkeypatch):
    """Those that no route gives as well; and whatever paths are asked for, the labels are few."""
    app = build_app(offline, ServeConfig("model", max_body_bytes=1000))

    async def ask() -> str:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/embed", "/no/such/path", "/nor/this"):
                await client.post(path, content=b"y" * 1001)
            await client.post("/nothing", json={})
            await client.get("/embed")
            await client.post("/embed", json={"inputs": []})
            await client.post("/embed", json={"inputs": ["cat"]})
            return (await client.get("/metrics")).text

    monkeypatch.setattr(offline, "prepare", None)  # a mistake of ours
    found = re.findall(r'^cloze_requests_total\{operation="(.+)",status="(\d+)"\} (\d+)', asyncio.run(ask()), re.M)
    assert set(found) == {
        ("embed", "413", "1"),
        ("other", "413", "2"),
        ("other", "404", "1"),
        ("embed", "405", "1"),
        ("embed", "422", "1"),
        ("embed", "500", "1"),
    }


def test_a_body_in_tiny_chunks_and_requests_behind_it_are_answered(address):
    """However slowly they are parsed, so that other clients do not wait."""
    body = b" " * 4000 + b'{"inputs": ["cat"]}'
    tiny = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connect(address) as client:
        client.sendall(chunked(body) * 2 + tiny * 100 + last)
        answers = until_closed(client)
    assert answers.count(b"HTTP/1.1 200 OK") == 103 and answers.count(b'"vector"') == 2 and b'"ready":true' in answers


def test_a_body_without_a_length_is_bounded_and_its_client_may_end_it(address):
    """A connection closed on a client that still sends is reset, and the answer may be lost with it."""
    piece = b"1000\r\n%b\r\n" % (b"y" * 4096)
    with connect(address) as client:
        client.sendall(b"POST /fill-mask HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + piece * 6)
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")
        for _ in range(20):
            client.sendall(piece)
            time.sleep(0.01)
        client.sendall(b"0\r\n\r\n")
        assert b"more than 20000 bytes" in answer + until_closed(client)


def test_a_body_that_is_declared_too_large_is_not_asked_for(address):
    with connect(address) as client:
        client.sendall(
            b"POST /embed HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 20001\r\n\r\n"
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_refused_client_that_never_ends_its_body_is_cut_off(address):
    with connect(address) as client:
        client.sendall(b"POST /fill-mask HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + b"y" * 30000)
        answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 413") and b"more than 20000 bytes" in answer


def test_many_clients_each_get_their_own_answers(address, offline):
    """32 clients, operations and options mixed, none waiting for another."""

    def client(seed: int) -> int:
        rng = random.Random(seed)
        with httpx.Client(base_url=address, timeout=60) as connection:
            for _ in range(12):
                texts = [blank(rng) for _ in range(rng.randint(1, 4))]
                top_k = rng.choice([1, 5])
                if rng.random() < 0.3:
                    answer = connection.post("/embed", json={"inputs": texts})
                    answers.append(("embed", texts, top_k, answer.status_code, answer.json()))
                else:
                    answer = connection.post("/fill-mask", json={"inputs": texts, "top_k": top_k})
                    answers.append(("fill-mask", texts, top_k, answer.status_code, answer.json()))
        return seed

    answers, before = [], read_meters(address)
    with ThreadPoolExecutor(32) as pool:
        assert sorted(pool.map(client, range(32))) == list(range(32))
    assert len(answers) == 32 * 12, "no request was lost"
    assert {status for *_, status, _ in answers} == {200}
    every = sorted({text for _, texts, *_ in answers for text in texts})
    guesses = dict(zip(every, offline.map(FillMask(top_k=5), every), strict=True))
    vectors = dict(zip(every, offline.embed(every), strict=True))
    for name, texts, top_k, _, content in answers:
        for text, result in zip(texts, content["results"], strict=True):
            if name == "embed":
                assert result["text"] == text and result["vector"] == pytest.approx(vectors[text].tolist(), abs=2e-5)
            else:
                assert_guesses(result, [blank[:top_k] for blank in guesses[text]], text)
    meters = read_meters(address)
    batches = meters["cloze_batch_texts_count"] - before["cloze_batch_texts_count"]
    assert batches < len(answers), "requests shared batches"
    assert meters['cloze_requests_total{operation="fill-mask",status="200"}'] > 200
    assert meters["cloze_waiting_tokens"] == 0


def test_a_full_queue_says_so_and_recovers(folder):
    with server(folder, "--max_queue_tokens", "2000", "--max_batch_tokens", "1") as (address, _):  # two requests
        text = "the cat sat on the mat and the sky is blue and the sea is blue the cat sat on the mat"

        def ask(_):
            return httpx.post(address + "/score", json={"inputs": [text] * 3}, timeout=60)

        with ThreadPoolExecutor(16) as pool:
            found = [(answer.status_code, answer.headers.get("retry-after")) for answer in pool.map(ask, range(48))]
        assert set(found) == {(200, None), (503, "1")}
        assert ask(0).status_code == 200 and httpx.get(address + "/ready").status_code == 200


def test_sigterm_answers_what_was_accepted(folder):
    with server(folder, "--max_batch_tokens", "500", fresh=True) as (address, process):
        text = "the cat sat on the mat and the sky is blue"
        httpx.post(address + "/score", json={"inputs": [text]})
        tokens = 120 * 11 * 13  # of a request: each of a text's 11 tokens is the blank once, between [CLS] and [SEP]
        results, sent = [], threading.Barrier(9)

        def ask():
            with httpx.Client(base_url=address, timeout=60) as client:
                client.get("/health")  # the connection stands
                sent.wait()
                results.append(client.post("/score", json={"inputs": [text] * 120}).status_code)

        clients = [threading.Thread(target=ask) for _ in range(8)]
        for client in clients:
            client.start()
        with httpx.Client(timeout=60) as poller:
            read_meters(address, poller)  # the connection stands
            sent.wait()
            deadline, answered = time.monotonic() + 60, 0
            while read_meters(address, poller)["cloze_waiting_tokens"] < (8 - answered) * tokens:
                assert time.monotonic() < deadline
                answered = len(results)  # before the meters are read: each request is in one of both, or not accepted
        assert answered < 8, "all were answered before the stop"
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join()
        output, errors = process.communicate(timeout=60)
        assert results == [200] * 8
        assert process.returncode == 0 and "every accepted request was answered" in output, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_behind_the_line_with_the_address_stops_the_server(folder, number):
    """It was lost where it came before the server listened to signals."""
    with server(folder) as (_, process):
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and "every accepted request was answered" in output, errors


def test_a_second_ctrl_c_drops_requests_and_says_so(folder):
    with server(folder) as (address, process):

        def ask(_):
            try:
                inputs = ["the cat sat on " * 11] * 60
                return httpx.post(address + "/score", json={"inputs": inputs}, timeout=60).status_code
            except httpx.HTTPError as error:
                return error

        with ThreadPoolExecutor(8) as pool:
            asked = pool.map(ask, range(8))
            deadline = time.monotonic() + 60
            while read_meters(address)["cloze_waiting_tokens"] < 60 * 44 * 46 * 7:
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGINT)
            with suppress(OSError):  # from when on the signal has been heard
                while time.monotonic() < deadline:
                    connect(address).close()
                    time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
            assert any(status != 200 for status in asked)
        assert process.returncode == 130 and "stopped by a second Ctrl-C" in output, errors
        assert "Traceback" not in errors
        assert "every accepted request was answered" not in output


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")
def test_the_page_in_a_browser(address, offline):
    from playwright.sync_api import sync_playwright

    text = "the [MASK] sat on [MASK]"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page, requested, errors = browser.new_page(), [], []
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#operation option", state="attached")
        page.fill("#text", text)
        page.click("#ask")
        page.wait_for_selector("#picture:visible")
        expected = offline.fill_mask(text, 10)
        assert page.locator("#guesses .guess b").all_inner_texts() == [g.token for blank in expected for g in blank]
        shown = page.locator("#guesses .guess").first.inner_text()
        assert f"{100 * expected[0][0].probability:.1f}%" in shown
        tokens = offline.attention(text).tokens
        assert page.locator("#attention th.top").all_inner_texts() == tokens
        assert page.locator("#attention td.cell").count() == len(tokens) ** 2
        before = page.locator("#attention").inner_html()
        page.select_option("#layer", label="2")
        assert page.locator("#attention").inner_html() != before
        page.fill("#text", "[MASK]" + " cat" * 20)
        page.click("#ask")
        page.wait_for_function("document.getElementById('error').textContent")
        assert "found more than 4,000 numbers" in page.inner_text("#error")
        assert page.locator("#picture").is_hidden() and page.locator("#guesses .guess").count() == 10
        page.fill("#text", "no blank <b>here</b>")
        page.click("#ask")
        page.wait_for_function("document.getElementById('error').textContent")
        assert "found no [MASK]" in page.inner_text("#error") and page.locator("#error b").count() == 0
        assert page.locator("#picture").is_hidden() and page.locator("#guesses .guess").count() == 0
        compare_senses(page, offline)
        page.goto(address + "/docs")
        page.wait_for_selector(".opblock")
        assert page.locator(".opblock").count() == len(offline.abilities()) + 4
        browser.close()
    assert not errors and all(url.startswith((address, "data:")) for url in requested), (errors, requested)


def compare_senses(page, offline) -> None:
    """The cosines of a word's occurrences, which are those of `cloze predict features --word`."""
    page.select_option("#operation", label="word senses")
    texts = ["the cat sat", "a cat on the cat"]
    page.fill("#text", "cat")
    page.fill("#pair", "\n".join([*texts, ""]))
    page.click("#ask")
    page.wait_for_selector("table.cosines")
    assert page.locator("mark").all_inner_texts() == ["cat1", "cat2", "cat3"] and page.locator("#picture").is_hidden()
    found = offline.word("cat", texts)
    expected = [[*each.cosines, each.cosine_to_static] for each in found]
    shown = [row.locator("td").all_inner_texts() for row in page.locator("table.cosines .guess").all()]
    assert [[float(cell) for cell in row] for row in shown] == [pytest.approx(row, abs=0.0051) for row in expected]


@contextmanager
def served_here(app):
    """Its address, served by a thread of this process."""
    served = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=served.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            served.should_exit = True
            thread.join()


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")
def test_the_page_asks_what_the_model_s_head_answers(tmp_path):
    """And brings an API key, once it was asked for one."""
    from playwright.sync_api import sync_playwright

    key = "0123456789abcdef0123456789abcdef"
    (tmp_path / "keys").write_text(key)
    heads = {
        "BertForSequenceClassification": ("classify", labels("bad", "good"), "cat", None),
        "BertForTokenClassification": ("tag", labels("PLACE", "PERSON"), "cat sat", None),
        "BertForQuestionAnswering": ("answer", {}, "cat", "the cat sat on the mat"),
        "BertForMultipleChoice": ("choose", {}, "the cat", "sat\nis blue"),
    }
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()  # each has a process of its own
        for kind, (operation, changes, first, second) in heads.items():
            predictor = Predictor.from_folder(save_model(tmp_path / kind, kind, **changes))
            config = ServeConfig("model", api_key_file=str(tmp_path / "keys") if operation == "classify" else None)
            with served_here(build_app(predictor, config)) as address:
                page.goto(address)
                if config.api_key_file:
                    page.wait_for_selector("#key-field:visible")
                    assert "expected `Authorization: Bearer KEY`" in page.inner_text("#error")
                    assert not page.inner_text("#model"), "not even what the model is called"
                    page.fill("#key", key)
                    page.press("#key", "Enter")
                page.wait_for_selector("#operation option", state="attached")
                assert page.input_value("#operation") == operation
                assert "word senses" not in page.inner_text("#operation"), "beside fill-mask only"
                assert page.locator("#pair").is_visible() == (second is not None)
                page.fill("#text", first)
                if second:
                    page.fill("#pair", second)
                page.click("#ask")
                page.wait_for_selector("#guesses .guess")
                shown = page.locator("#guesses .guess b").all_inner_texts()
                if operation == "classify":
                    assert shown == [each.label for each in predictor.classify(first)]
                elif operation == "tag":
                    assert page.locator("mark").count() == len(shown) > 0
                elif operation == "choose":
                    assert set(shown) == {"sat", "is blue"}
                assert not page.inner_text("#error")
        browser.close()


CARD = """---
widget:
- text: <b>cat</b> sat on
  example_title: Sitting
- text: the sky is blue
---
"""


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")
def test_the_page_names_the_model_and_shows_only_what_it_reads(tmp_path):
    """Of classifiers of texts and of pairs, with a card and without, and of one whose training is not known."""
    from playwright.sync_api import sync_playwright

    folder = save_model(tmp_path / "model", "BertForSequenceClassification", **labels("login", "<i>bug</i>"))
    note = json.loads((folder / "config.json").read_text())
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()  # each has a process of its own
        for columns, card in ((["ticket"], CARD), (["premise", "hypothesis"], ""), (None, "")):
            known = {"cloze_columns": {"texts": columns}} if columns else {}
            (folder / "config.json").write_text(json.dumps(note | known))
            (folder / "README.md").write_text(card)
            predictor = Predictor.from_folder(folder)
            with served_here(build_app(predictor, ServeConfig("us/tickets"))) as address:
                page.goto(address)
                page.wait_for_selector("#operation option", state="attached")
                assert page.title() == "us/tickets - Cloze"
                said = page.inner_text("#model")
                assert "us/tickets (BertForSequenceClassification)" in said and "Labels: login, <i>bug</i>" in said
                assert page.inner_text("#first") == (columns or ["Text"])[0]
                assert page.locator("#pair").is_visible() == (columns == ["premise", "hypothesis"])
                assert page.locator("#paired").is_visible() == (columns is None)
                assert page.locator("#example").is_visible() == bool(card)
                if card:
                    assert page.input_value("#text") == "<b>cat</b> sat on"
                    assert page.locator("#example option").all_inner_texts() == ["Sitting", "the sky is blue"]
                    page.select_option("#example", label="the sky is blue")
                    assert page.input_value("#text") == "the sky is blue"
                else:
                    assert page.input_value("#text") == "" and page.get_attribute("#text", "placeholder")
                    page.fill("#text", "the sky")
                    if columns:
                        page.fill("#pair", "the sea")
                if columns is None:
                    page.check("#paired")
                    page.fill("#pair", "cat")
                page.click("#ask")
                page.wait_for_selector("#guesses .guess")
                given = page.input_value("#text"), page.input_value("#pair") if len(columns or "12") == 2 else None
                best = predictor.classify(*given)[0]
                assert page.locator("#guesses .guess").first.inner_text() == f"{best.label} {best.score:.4f}"
        browser.close()
