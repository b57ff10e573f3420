"""A JSON line that is too long for memory is read, or refused, as the same line is that fits into it."""

import json
import random
import re

import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.readers import files, lines
from cloze.pipeline.readers.long_lines import LongLine
from tests.pipeline.readers.test_readers import read

TEXT = 'first é \\n \\"quoted\\" 中\\u4e2d \\ud83d\\ude00 ' + "x y " * 12 + "last"
GOOD = [
    f'{{"id": "a", "text": "{TEXT}"}}',
    f'  {{ "id" :7 , "more": {{"text": "no", "id": [1, "}}", {{"text": "{TEXT}"}}]}}, "text" : "{TEXT}" , "z": 0 }}  ',
    f'{{"long": "{TEXT}", "id": null, "text": "short", "{TEXT}": [true, "\\u007f"]}}',
    f'{{"id": "{TEXT}", "text": "", "z": -1.5e3}}',
    f'{{"id": 1, "text": null, "z": "{TEXT}"}}',
    f'{{"id": 1, "t\\u0065xt": "{TEXT}"}}',
    '{"id": 1,' + " " * 50 + '"text":' + "\t" * 50 + f'"{TEXT}"}}\r',
    f'\ufeff{{"id": 1, "text": "{TEXT}"}}',
    f'{{"id": ["doc", {{"part": "{TEXT}", "{TEXT}": ["\\u0031"]}}, 2], "a": ["no"], "text": "{TEXT}"}}',
]
BAD = [
    f'{{"id": 1, "text": "{TEXT}"}} {{"id": 2, "text": "lost"}}',
    f'{{"id": 1, "text": "{TEXT}", "text": "twice"}}',
    f'{{"id": 1, "text": "{TEXT}", "id": 2}}',
    f'{{"id": 1, "text": "{TEXT}"',
    f'{{"id": 1, "text": "{TEXT}" "z": 1}}',
    f'{{"id": 1, "text": "{TEXT}", "z" 1}}',
    f'{{"id": 1, "text": "{TEXT}"}} garbage',
    f'{{"id": 1, "text": "{TEXT}",}}',
    f'{{"id": 1, "text": "{TEXT}", "z": 01}}',
    f'{{"id": 1, "text": "{TEXT}", "z": [1, }}}}',
    f'{{"id": 1, "text": "{TEXT}", "z": "{TEXT}\\q"}}',
    f'{{"id": 1, "text": "{TEXT}", "z": "{TEXT}\\u12"}}',
    f'{{"id": 1, "text": "{TEXT}", "z": "{TEXT}\x01"}}',
    f'{{"id": 1, "text": "{TEXT}", "z": "{TEXT}',
    f'{{"id": 1, "text": "{TEXT}", "z": "{TEXT}\\',
    f'{{"id": 1, "text": "{TEXT}\\x"}}',
    f'{{"id": 1, "text": "{TEXT}',
    f'{{"id": 1 "text": "{TEXT}"}}',
    f'{{"id": 1, text: "{TEXT}"}}',
    f'{{"é": 1, é: "{TEXT}"}}',
    f'{{"id": 1, "text": 3, "z": "{TEXT}"}}',
    f'{{"id": 1, "text": ["{TEXT}"]}}',
    f'{{"id": 1, "body": "{TEXT}"}}',
    f'["id", "text", "{TEXT}"]',
    f'"{TEXT}"',
    f'\ufeff\ufeff{{"id": 1, "text": "{TEXT}"}}',
    f'{{"id": 1, "text": "{TEXT}\\ud800", "z": 1}}',
    f'{{"id": 1, "text": "{TEXT}", "z": ' + "[" * 100_000 + "}",
]


def outcome(path, monkeypatch, held, block, piece, **source):
    """The documents of a file, each with its pieces joined, or why it is refused."""
    with monkeypatch.context() as patch:
        patch.setattr(lines, "LONGEST_JSON_LINE", held)
        # What may be kept of a line would be as little as what makes it long.
        patch.setattr(lines, "LongLine", lambda *given: LongLine(*given[:3], most=1 << 20))
        patch.setattr(files, "BLOCK_BYTES", block)
        patch.setattr(lines, "LONGEST_PIECE", piece)
        try:
            found = read([path], id_field="id", **source)
        except UserError as error:
            return str(error)
    places = [document.order for document in found]
    assert places == sorted(set(places)), "each piece before the next, and before the next line"
    documents = []
    for document in found:
        if document.piece <= 1:
            documents.append([document.id, b""])
        documents[-1][1] += document.text
    return documents


def assert_alike(tmp_path, monkeypatch, line: bytes, cuts) -> object:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 0, "text": "before"}\n' + line + b'\n{"id": 9, "text": "behind"}\n')
    short = outcome(path, monkeypatch, 1 << 20, 1 << 20, 1 << 20)
    for block, piece in cuts:
        assert outcome(path, monkeypatch, 40, block, piece) == short, (line[:200], block, piece)
    return short


CUTS = [(7, 16), (16, 13), (64, 64), (101, 1000)]


@pytest.mark.parametrize("line", GOOD)
def test_a_good_line_is_the_same_document(tmp_path, monkeypatch, line):
    before, found, behind = assert_alike(tmp_path, monkeypatch, line.encode(), CUTS)
    record = json.loads(line.strip().strip("\ufeff"))
    assert found == [None if record["id"] is None else str(record["id"]), (record["text"] or "").encode()]
    assert (before[1], behind[1]) == (b"before", b"behind")


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_refused_in_the_same_words(tmp_path, monkeypatch, line):
    message = assert_alike(tmp_path, monkeypatch, line.encode(), CUTS)
    assert isinstance(message, str) and message.startswith(f"{tmp_path}/a.jsonl: byte 28: ")


@pytest.mark.parametrize("errors", ["stop", "replace"])
@pytest.mark.parametrize("line", ['{"id": "a\0b", "text": "TEXT"}', '{"id": 1, "z": "TEXT\0", "text": "TEXT\0"}'])
def test_zero_bytes_in_any_string_stop_or_are_replaced(tmp_path, monkeypatch, line, errors):
    path = tmp_path / "a.jsonl"
    path.write_text(line.replace("TEXT", TEXT) + "\n", encoding="utf-8")
    short = outcome(path, monkeypatch, 1 << 20, 1 << 20, 1 << 20, encoding_errors=errors)
    assert ("found byte 0x00" if errors == "stop" else "\ufffd") in str(short).replace("\\xef\\xbf\\xbd", "\ufffd")
    for block, piece in CUTS:
        assert outcome(path, monkeypatch, 40, block, piece, encoding_errors=errors) == short


def test_any_damage_is_refused_in_the_same_words(tmp_path, monkeypatch):
    """A good line with a character too many, too few or another one: read or refused alike. (Without surrogates: a lone
    one in the text is refused when it is met, before what is wrong behind it.)
    """
    rng, outcomes = random.Random(0), set()
    for _ in range(300):
        line = rng.choice(GOOD).replace("\\ud83d\\ude00", "")
        start = rng.randrange(len(line))
        stop = start + rng.choice([0, 1, 1, 2, 9])
        line = line[:start] + rng.choice(["", "", *'"\\{}[]:,x1 é', '"z"', "\\u", '"text": "again",']) + line[stop:]
        found = assert_alike(tmp_path, monkeypatch, line.encode(), [(rng.randrange(5, 90), rng.randrange(13, 90))])
        outcomes.add(re.sub(r"\d+|'.*?'", "", found[found.index(":") :]) if isinstance(found, str) else "read")
    assert "read" in outcomes and len(outcomes) > 8


def test_a_long_line_keeps_only_so_much_besides_its_strings(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 500)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "t", "numbers": [' + "1, " * 2000 + "1]}\n")
    with pytest.raises(UserError, match="byte 0: found a line with more than .* MB besides the strings in its fields"):
        read([tmp_path])


def test_an_id_behind_the_text_of_a_long_line_is_asked_to_stand_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 500)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x " * 2000, "id": "late"}) + "\n")
    with pytest.raises(UserError, match="byte 0: found no 'id' before the text of a long line; put it there"):
        read([tmp_path], id_field="id")


def test_lone_surrogates_are_replaced_wherever_a_piece_ends(tmp_path, monkeypatch):
    """Of two first halves and a second one, the first is alone, and the others are one character."""
    halves, path = "\\ud83d\\ud83d\\ude00\\ude00\\ud83d\\u00e9\\ud83d", tmp_path / "a.jsonl"
    for before in range(14):
        path.write_text(f'{{"id": 1, "text": "{"x" * before}{halves * 3}{"x" * 40}"}}\n', encoding="utf-8")
        short = outcome(path, monkeypatch, 1 << 20, 1 << 20, 1 << 20, encoding_errors="replace")
        assert short == [["1", ("x" * before + "\ufffd\U0001f600\ufffd\ufffdé\ufffd" * 3 + "x" * 40).encode()]]
        for piece in (13, 16, 31):
            assert outcome(path, monkeypatch, 40, 64, piece, encoding_errors="replace") == short, (before, piece)


def test_all_pieces_of_a_line_stand_before_the_next_line(tmp_path, monkeypatch):
    """Also where its last block has fewer bytes than the line has pieces."""
    path = tmp_path / "a.jsonl"
    for length in range(700, 800):
        path.write_text(f'{{"id": 1, "text": "{"x" * length}"}}\n{{"id": 2, "text": "y"}}\n')
        assert outcome(path, monkeypatch, 100, 16, 13) == [["1", b"x" * length], ["2", b"y"]], length
