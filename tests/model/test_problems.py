"""What heads predict: every problem, saved, read again, and against torch's own formulas."""

import pytest
import torch
from torch.nn import functional

from cloze.model.config import BertConfig, ModelError
from cloze.model.huggingface import load_head
from cloze.model.problems import PROBLEMS, HeadConfig
from cloze.model.tasks import BertForSequenceClassification
from tests.tables import assert_same_names

COLUMNS = (("size", ("small", "large")), ("kind", ("a", "b", "c")))
LABELS = ("one", "two", "three")
CLASSES = torch.tensor([2, 0, -100, 1])
CHOSEN = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
# Problem -> head, labels of four examples, their mean loss and the probabilities by column, by torch's own functions.
REFERENCES = {
    "single_label": (
        HeadConfig(LABELS),
        CLASSES,
        lambda scores: functional.cross_entropy(scores, CLASSES),
        lambda scores: {None: functional.softmax(scores, 1)},
    ),
    "multi_label": (
        HeadConfig(LABELS, "multi_label"),
        CHOSEN,
        lambda scores: functional.binary_cross_entropy_with_logits(scores, CHOSEN.float()),
        lambda scores: {None: torch.sigmoid(scores)},
    ),
    "regression": (
        HeadConfig(LABELS, "regression"),
        CHOSEN.float(),
        lambda scores: functional.mse_loss(scores, CHOSEN.float()),
        lambda scores: {None: scores},
    ),
    "score": (
        HeadConfig(("number",), "score"),
        CLASSES.float(),
        lambda scores: functional.mse_loss(scores[:, 0], CLASSES.float()),
        lambda scores: {None: torch.sigmoid(scores)},
    ),
    "columns": (
        HeadConfig((), "columns", COLUMNS),
        torch.stack([CLASSES.clamp(max=1), CLASSES], 1),
        lambda scores: (
            functional.cross_entropy(scores[:, :2], CLASSES.clamp(max=1))
            + functional.cross_entropy(scores[:, 2:], CLASSES)
        ),
        lambda scores: {"size": functional.softmax(scores[:, :2], 1), "kind": functional.softmax(scores[:, 2:], 1)},
    ),
}


def test_every_problem_has_a_reference():
    assert_same_names(PROBLEMS, REFERENCES, "REFERENCES in this file, losses and probabilities by torch")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_transformers_reads_is_said_by_its_names(problem):
    """Each by one problem alone (modeling_utils' losses know these three); others go out in our own format."""
    own = PROBLEMS[problem]
    theirs = ("single_label_classification", "multi_label_classification", "regression")
    assert own.problem_type in (theirs if own.in_transformers else ()) or own.problem_type is None
    alike = [name for name, each in PROBLEMS.items() if own.problem_type and each.problem_type == own.problem_type]
    assert alike in ([], [problem])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_losses_and_probabilities_are_those_of_torch(problem):
    head, labels, loss, probabilities = REFERENCES[problem]
    assert head.problem == problem
    scores = torch.randn(4, head.num_outputs, generator=torch.Generator().manual_seed(1))
    losses, count = head.losses(scores, labels)
    torch.testing.assert_close((losses.sum(0) / count).sum(), loss(scores))
    found, expected = head.probabilities(scores), probabilities(scores)
    assert found.keys() == expected.keys() == head.classes.keys()
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name])
        assert values.shape[1] == len(head.classes[name])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_head_comes_back_as_it_went_out(tmp_path, problem):
    """In transformers' format where that can say it, else in our own; nothing is written that can't be read."""
    head = REFERENCES[problem][0]
    model = BertForSequenceClassification(BertConfig.preset("tiny", vocab_size=40), head).eval()
    model.save(tmp_path)
    assert load_head(tmp_path) == head
    again = BertForSequenceClassification.from_folder(tmp_path)
    ids, mask = torch.arange(5, 11).view(1, -1), torch.tensor([6])
    assert torch.equal(again(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize(
    "given", [(LABELS, "score"), (LABELS, "columns"), (LABELS, "single_label", COLUMNS), (LABELS, "ranking")]
)
def test_a_head_that_does_not_fit_its_problem_is_refused(given):
    with pytest.raises(ModelError, match=r"^head\.\w+: found .*, expected "):
        HeadConfig(*given)
