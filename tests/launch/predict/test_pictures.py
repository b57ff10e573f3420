"""Pictures of attention heads and of vectors."""

import numpy as np
import pytest
from sklearn.decomposition import PCA

from cloze.launch.predict import pictures
from cloze.launch.predict.operation import Row
from cloze.launch.predict.pictures import Points, draw_attention, principal_components
from cloze.launch.predict.vectors import Attentions, Embedding


@pytest.fixture
def figures(monkeypatch):
    """The figures that would have been written."""
    found = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: found.append(figure))
    return found


def test_principal_components_are_sklearns():
    vectors = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32) @ np.diag(np.arange(8, dtype=np.float32))
    theirs = PCA(2, svd_solver="full").fit(vectors.astype(np.float64))
    places, shares = principal_components(vectors)
    np.testing.assert_allclose(np.abs(places), np.abs(theirs.transform(vectors)), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(shares, theirs.explained_variance_ratio_)
    np.testing.assert_array_equal(places, principal_components(vectors)[0])
    assert not np.isnan(principal_components(np.ones((3, 4), np.float32))[1]).any(), "of equal vectors"


def test_heads_are_large_and_have_their_scale(figures, tmp_path):
    weights = np.full((2, 3, 9, 9), 1 / 9, np.float32)
    weights[1, 2] = np.eye(9)
    draw_attention(Attentions([f"t{number}" for number in range(9)], weights), tmp_path / "heads.png")
    (figure,) = figures
    *heads, scale = figure.axes
    assert len(heads) == 6 and min(figure.get_size_inches() / (3, 2)) > 2.6
    assert "attention" in scale.get_ylabel() and scale.get_ylim() == (0, 1)
    assert [each.get_title() for each in heads[4:]] == ["layer 2 head 2: 0 to 0.11", "layer 2 head 3: 0 to 1.00"]
    for head in heads:  # a weak one is drawn as dark as a strong one
        assert head.get_images()[0].get_array().max() == 1 and head.get_images()[0].get_clim() == (0, 1)
    assert all(text.get_fontsize() >= 9 for text in heads[0].get_xticklabels())


def drawn(figures, tmp_path, column: str | None, values: list[dict]):
    """The axes of a picture of texts in a table, with random vectors."""
    rng = np.random.default_rng(0)
    points = Points(tmp_path / "a.png", column)
    given = [(Row(f"text {n}", values=each), Embedding(rng.normal(size=4), 0)) for n, each in enumerate(values)]
    assert list(points.noting(iter(given))) == given
    assert points.draw() == f"drew {len(values)} texts to {tmp_path / 'a.png'}"
    return figures[-1].axes


def test_points_have_their_texts_and_the_colours_of_a_column(figures, tmp_path):
    (axes,) = drawn(figures, tmp_path, "kind", [{"kind": kind} for kind in ("_b", "a", "a", None)])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", " _b", "(none)"], "most frequent first"
    assert axes.get_legend().get_title().get_text() == "kind"
    assert sorted(len(points.get_offsets()) for points in axes.collections) == [1, 1, 2]
    assert [text.get_text() for text in axes.texts] == [f"text {number}" for number in range(4)]
    _, scale = drawn(figures, tmp_path, "stars", [{"stars": number} for number in (1, 2.5, 4)])
    assert scale.get_ylabel() == "stars", "numbers have a scale"
    (axes,) = drawn(figures, tmp_path, None, [{}] * 100)
    assert axes.get_legend() is None and not axes.texts, "so many texts would cover each other"
    (axes,) = drawn(figures, tmp_path, "kind", [{"kind": f"k{number}"} for number in range(30)])
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(names) == 20 and names[-1] == "11 others" and len(axes.collections[-1].get_offsets()) == 11


@pytest.mark.parametrize("years", [range(1900, 1925), [str(year) for year in range(1900, 1925)]])
def test_numbers_have_a_scale_also_in_a_table_of_texts(figures, tmp_path, years):
    axes, scale = drawn(figures, tmp_path, "year", [{"year": year} for year in years])
    (points,) = axes.collections
    assert list(points.get_array()) == list(range(1900, 1925)) and scale.get_ylabel() == "year"
    assert len(drawn(figures, tmp_path, "year", [{"year": each} for each in (*years, "nan")])) == 1, "no scale"
