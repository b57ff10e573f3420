"""What a model without a named operation is asked."""

from tests.launch.errors import error_of
from tests.launch.predict.asking import lines


def test_a_model_without_an_operation_is_asked_what_its_head_is_for(folders, capsys):
    for model, texts, key in (
        ("pretrained", ["the [MASK] sat"], "blanks"),
        ("classifier", ["the cat"], "labels"),
        ("tagger", ["the cat"], "tags"),
        ("answerer", ["who ?", "--context", "the cat"], "answers"),
    ):
        (line,) = lines(capsys, "predict", folders / model, *texts)
        assert key in line
    (line,) = lines(capsys, "predict", "--top_k", 1, folders / "classifier", "the cat")
    assert len(line["labels"]) == 1
    error = error_of(capsys, "predict", "clasify", folders / "classifier", "a")
    assert "cloze predict: found operation 'clasify', expected one of fill-mask" in error
    assert "did you mean predict classify?" in error
    assert "found no folder" in error_of(capsys, "predict", "./nowhere", "a")
    error = error_of(capsys, "predict", "attention", folders / "pretrained", "--offline", "true")
    assert "found 'attention', expected an operation (fill-mask, " in error and "`cloze serve` and Python only" in error
    assert "read as the name of a model: model: found no folder and no hub model 'attention'" in error
