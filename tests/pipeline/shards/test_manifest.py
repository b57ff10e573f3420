"""The manifest of a prepared folder, as it is written."""

import dataclasses
import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from cloze.pipeline.shards.manifest import Manifest


def test_the_manifest_survives_a_round_trip(data):
    manifest = Manifest.load(data)
    assert manifest.to_json() == (data / "manifest.json").read_text(encoding="utf-8")
    assert manifest.hash == hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()


_NAMES = st.text(st.sampled_from('a"\\\n},{ []:é\u2028'), max_size=6)
_SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _NAMES
_ROWS = st.lists(st.dictionaries(_NAMES, _SIMPLE, max_size=3), max_size=3)
_JSON = st.recursive(
    _SIMPLE | st.lists(_SIMPLE, max_size=3) | _ROWS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=10,
)


@given(preparation=st.dictionaries(_NAMES, _JSON, max_size=3), sources=_ROWS)
def test_a_manifest_is_written_as_python_writes_indented_json(data, preparation, sources):
    manifest = dataclasses.replace(Manifest.load(data), preparation=preparation, sources=sources)
    assert manifest.to_json() == json.dumps(json.loads(manifest.to_json()), indent=1, ensure_ascii=False) + "\n"
    assert json.loads(manifest.to_json())["preparation"] == preparation
