"""Compressed inputs: every codec, several streams, and what follows a stream."""

import gzip
import json
import lzma

import pytest

from cloze.pipeline.errors import UserError
from tests.pipeline import corpus
from tests.pipeline.readers.inputs import COMPRESSORS, compress, read, texts


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS])
def test_compressed_files_have_the_documents_of_plain_ones(tmp_path, suffix):
    expected = ["one a\nline two", "two", "three"]
    compress(tmp_path / f"a.txt{suffix}", b"\n\none a\nline two\n\n \t\n\ntwo\n\nthree")
    compress(tmp_path / f"b.jsonl{suffix}", "".join(json.dumps({"text": t}) + "\n" for t in expected).encode())
    assert texts([tmp_path / f"a.txt{suffix}"]) == expected
    assert texts([tmp_path / f"b.jsonl{suffix}"]) == expected
    assert texts([tmp_path / f"a.txt{suffix}"], format="file") == ["one a\nline two\n\n \t\n\ntwo\n\nthree"]
    assert texts([tmp_path]) == expected * 2


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_what_goes_on_behind_a_stream_is_read_or_an_error(tmp_path, suffix):
    """Wherever the second stream is cut off, whatever comes in its place, and in the pieces that files are read in."""
    compressor, path = COMPRESSORS[suffix], tmp_path / f"a.txt{suffix}"
    first, second = (compressor(text.encode()) for text in corpus.documents(2))
    damaged = bytearray(second)
    damaged[:4] = b"\0\xff\0\xff"
    after = [second[:cut] for cut in (1, 3, len(second) // 2, len(second) - 1)]
    after += [b"x", b"garbage" * 99999, bytes(damaged), b"\0" * 4 + b"x", gzip.compress(b"x")[:-4]]
    for rest in after:
        path.write_bytes(first + rest)
        with pytest.raises(UserError, match=f"a.txt{suffix}: can't be read to its end"):
            read([path])
    for cut in (1, len(first) // 2, len(first) - 1):
        path.write_bytes(first[:cut])
        with pytest.raises(UserError, match=f"a.txt{suffix}: can't be read to its end"):
            read([path])


@pytest.mark.parametrize("padding", [4, 8, 512, 16384, 1 << 16])
def test_xz_streams_with_padding_between_and_behind(tmp_path, padding):
    """In multiples of four bytes (section 2.2 of the .xz file format)."""
    parts = corpus.documents(3)
    for end in (0, padding):
        packed = (b"\0" * padding).join(lzma.compress(f"{part}\n\n".encode()) for part in parts) + b"\0" * end
        (tmp_path / "a.txt.xz").write_bytes(packed)
        assert "\n\n".join(texts([tmp_path])).split() == "\n\n".join(parts).split()
        (tmp_path / "a.txt.xz").write_bytes(packed + b"\0")
        with pytest.raises(UserError, match="a.txt.xz: can't be read to its end .found .* bytes of padding"):
            read([tmp_path])
