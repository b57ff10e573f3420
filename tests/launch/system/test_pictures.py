"""What all pictures share: endings, colours, texts."""

import warnings

import pytest
from matplotlib.image import imread

from cloze.launch.system import pictures
from cloze.pipeline.errors import UserError


def test_a_file_that_is_no_picture_is_refused():
    for path in (None, "a.png", "a/b.pdf", "a.svg"):
        pictures.check_ending("picture", path)
    with pytest.raises(UserError, match=r"picture: found a.gif, expected a picture: a name that ends in .png"):
        pictures.check_ending("picture", "a.gif")


def test_a_missing_library_is_named_with_its_command(monkeypatch):
    pictures.check_library("grid")
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="grid: found no matplotlib, expected it for pictures; pip install"):
        pictures.check_library("grid")


@pytest.mark.parametrize("number", [1, 10, 11, 20, 21, 60])
def test_colours_differ(number):
    assert len(set(map(tuple, pictures.colours(number)))) == number


def test_texts_of_users_are_drawn_as_they_are(tmp_path):
    """Dollars begin no formula, a sign without a font warns of nothing, and a picture is never too large to be seen."""
    figure = pictures.new_figure(2, 1000)
    axes = figure.subplots()
    axes.set_yticks([0, 1], ["a $x_$", "$$ ^"])
    axes.plot([0, 1], label="\U00016a00 $")
    axes.legend(title="$ $ _{")
    figure.set_figheight(figure.get_figheight() / 20)  # the limit has been met; a small picture is quick to write
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures.save(figure, tmp_path / "new" / "a.png")
    height, width, _ = imread(tmp_path / "new" / "a.png").shape
    assert (width, height) == (2 * pictures.DPI, pictures.LARGEST_INCHES * pictures.DPI / 20)
