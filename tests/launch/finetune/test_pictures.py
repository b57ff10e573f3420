"""The picture of a confusion matrix."""

from collections import Counter

import numpy as np
from sklearn.metrics import confusion_matrix

from cloze.launch.finetune import pictures
from cloze.launch.finetune.examples.predicted import Confusion


def test_each_row_shows_its_shares_and_counts(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    labels = ["10", "2", "never", "rare"]
    true, guessed = rng.choice(labels, (2, 300), p=[0.6, 0.39, 0, 0.01])
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure))
    confusion = Confusion(Counter(zip(true.tolist(), guessed.tolist(), strict=True)), labels)
    pictures.draw_confusion(confusion, "validation: confusion", tmp_path / "a.png")
    axes, scale = figures[0].axes
    found = ["10", "2", "rare"]
    shares = confusion_matrix(true, guessed, labels=found, normalize="true")
    np.testing.assert_allclose(axes.images[0].get_array(), shares)
    counts = confusion_matrix(true, guessed, labels=found)
    assert [text.get_text() for text in axes.texts] == [str(count) for count in counts.ravel()]
    assert [text.get_text() for text in axes.get_yticklabels()] == found, "in the order of the labels"
    assert scale.get_ylabel() == "share of the true class" and axes.images[0].get_clim() == (0, 1)


def test_more_classes_than_can_be_read_are_not_drawn(tmp_path):
    names = [str(number) for number in range(101)]
    pictures.draw_confusion(Confusion(Counter(zip(names, names, strict=True)), names), "", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
