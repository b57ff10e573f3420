"""Readers, manifests, tokenizers, states and metadata against simple references; attack.py reads some thousands."""

from tests.hostile_values import KINDS, readings


def test_changed_values_are_refused_in_a_line_or_read_as_they_are(tmp_path):
    found = list(readings(tmp_path, 250, seed=29))
    assert {kind for kind, _ in found} == set(KINDS)
    assert [(kind, wrong) for kind, wrong in found if wrong] == []
