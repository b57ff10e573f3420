"""Every head against its namesake in transformers: scores, losses, every gradient; layouts; folders."""

import dataclasses
import json

import pytest
import torch
import transformers

from cloze.model.bert import BertForPreTraining, BertModel
from cloze.model.config import ModelError
from cloze.model.problems import HeadConfig
from cloze.model.tasks import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from tests.model.model_batches import (
    FLAT,
    INPUTS,
    TINY,
    TOLERANCE,
    assert_equal_gradients,
    batch,
    both_inputs,
    concatenate,
    pretraining_model,
    scramble,
    theirs_of,
)

THREE = HeadConfig(labels=("a", "b", "c"))


def check(model, ours, expected, theirs, scores, expected_scores):
    torch.testing.assert_close(scores, expected_scores, **TOLERANCE)
    torch.testing.assert_close(ours.loss, expected.loss, **TOLERANCE)
    model.zero_grad()
    theirs.zero_grad()
    ours.loss.backward()
    expected.loss.backward()
    assert_equal_gradients(model, theirs)


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
def test_masked_lm(layout):
    model = scramble(BertForMaskedLM(TINY))
    padded, inputs, flat = both_inputs()
    theirs = theirs_of(model)
    expected = theirs(**inputs, labels=padded["labels"])
    if layout == "padded":
        scores, wanted = model(**inputs).prediction_logits, expected.logits
        ours = model(**inputs, labels=padded["labels"])
    else:
        picked = {name: concatenate(padded)[name] for name in ("masked_positions", "labels")}
        scores = model(**flat, masked_positions=picked["masked_positions"]).prediction_logits
        wanted = expected.logits[padded["attention_mask"].bool()][picked["masked_positions"]]
        ours = model(**flat, **picked)
    check(model, ours, expected, theirs, scores, wanted)


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
def test_next_sentence(layout):
    model = scramble(BertForNextSentencePrediction(TINY))
    padded, inputs, flat = both_inputs()
    theirs = theirs_of(model)
    expected = theirs(**inputs, labels=padded["next_sentence_label"])
    ours = model(**(inputs if layout == "padded" else flat), next_sentence_label=padded["next_sentence_label"])
    check(model, ours, expected, theirs, ours.next_sentence_logits, expected.logits)


PROBLEMS = {
    "single_label": (THREE, torch.tensor([0, 2, 1, -100, 2])),
    "multi_label": (HeadConfig(("a", "b", "c"), "multi_label"), torch.eye(5)[:, :3]),
    "regression": (HeadConfig(("score",), "regression"), torch.tensor([0.5, -1.0, 2.0, 3.0, 0.0])),
    "score": (HeadConfig(("score",), "score"), torch.tensor([0.5, -1.0, 2.0, 3.0, 0.0])),
    "several numbers": (HeadConfig(("x", "y"), "regression"), torch.arange(10.0).view(5, 2)),
}


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
@pytest.mark.parametrize("problem", list(PROBLEMS))
def test_sequence_classification(problem, layout):
    head, labels = PROBLEMS[problem]
    model = scramble(BertForSequenceClassification(TINY, head))
    _, inputs, flat = both_inputs()
    theirs = theirs_of(model)
    expected = theirs(**inputs, labels=labels)
    ours = model(**(inputs if layout == "padded" else flat), labels=labels)
    check(model, ours, expected, theirs, ours.logits, expected.logits)


def test_a_single_label_of_which_nothing_is_said_has_the_loss_of_the_reference(tmp_path):
    """A cross-encoder's, whose sigmoid is the affair of who reads it."""
    _, inputs, _ = both_inputs()
    labels = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.0])
    config = transformers.BertConfig(
        vocab_size=211, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, num_labels=1
    )
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = BertForSequenceClassification.from_folder(tmp_path / "theirs")
    torch.testing.assert_close(model(**inputs, labels=labels).loss, theirs(**inputs, labels=labels).loss, **TOLERANCE)
    model.save(tmp_path / "ours")
    assert BertForSequenceClassification.from_folder(tmp_path / "ours").head == model.head
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").problem_type is None


def test_several_label_columns_have_a_softmax_each_and_their_losses_are_summed():
    head = HeadConfig(problem="columns", columns=(("size", ("s", "m", "l")), ("kind", ("cat", "dog"))))
    model = scramble(BertForSequenceClassification(TINY, head))
    _, _, flat = both_inputs()
    labels = torch.tensor([[0, 1], [2, 0], [1, 1], [-100, 0], [2, -100]])
    output = model(**flat, labels=labels)
    parts = {"size": output.logits[:, :3], "kind": output.logits[:, 3:]}
    expected = sum(
        torch.nn.functional.cross_entropy(part, labels[:, column]) for column, part in enumerate(parts.values())
    )
    shares = head.probabilities(output.logits)
    assert shares.keys() == parts.keys()
    assert all(torch.equal(shares[name], part.softmax(1)) for name, part in parts.items())
    torch.testing.assert_close(output.loss, expected, **TOLERANCE)
    assert output.losses.shape == (5, 2) and output.num_labelled.tolist() == [4, 4]


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
def test_token_classification(layout):
    model = scramble(BertForTokenClassification(TINY, THREE))
    padded, inputs, flat = both_inputs()
    mask = padded["attention_mask"].bool()
    labels = torch.where(mask, padded["input_ids"] % 3, -100)
    labels[:, 0] = -100
    theirs = theirs_of(model)
    expected = theirs(**inputs, labels=labels)
    if layout == "padded":
        ours = model(**inputs, labels=labels)
        check(model, ours, expected, theirs, ours.logits, expected.logits)
    else:
        ours = model(**flat, labels=labels[mask])
        check(model, ours, expected, theirs, ours.logits, expected.logits[mask])


def test_question_answering_over_padded_inputs():
    model = scramble(BertForQuestionAnswering(TINY))
    _, inputs, _ = both_inputs()
    theirs = theirs_of(model)
    positions = dict(
        start_positions=torch.tensor([1, 47, 3, 48, 0]), end_positions=torch.tensor([2, 47, 16, 99, 29])
    )  # 48 and 99 lie outside
    expected, ours = theirs(**inputs, **positions), model(**inputs, **positions)
    torch.testing.assert_close(ours.end_logits, expected.end_logits, **TOLERANCE)
    check(model, ours, expected, theirs, ours.start_logits, expected.start_logits)
    assert ours.num_starts == ours.num_ends == 4 and ours.start_losses[3] == 0


def test_question_answering_over_concatenated_tokens_is_the_reference_sequence_by_sequence():
    model = scramble(BertForQuestionAnswering(TINY))
    padded, inputs, flat = both_inputs()
    starts, ends = torch.tensor([1, 47, 3, -1, 0]), torch.tensor([2, 47, 16, 9, 29])
    theirs = theirs_of(model)
    lengths = padded["attention_mask"].sum(1).tolist()
    losses = []
    for number, length in enumerate(lengths):  # alone, so that no padding enters the reference's softmax
        one = {name: tensor[number : number + 1, :length] for name, tensor in inputs.items()}
        scores = theirs(**one)
        for logits, position in ((scores.start_logits, starts[number]), (scores.end_logits, ends[number])):
            outside = not 0 <= position < length
            losses.append(0.0 if outside else torch.nn.functional.cross_entropy(logits[0], position))
    ours = model(**flat, start_positions=starts, end_positions=ends)
    assert ours.num_starts == ours.num_ends == 4
    torch.testing.assert_close(ours.loss, sum(losses) / 8, **TOLERANCE)
    theirs.zero_grad()
    ours.loss.backward()
    (sum(losses) / 8).backward()
    assert_equal_gradients(model, theirs)


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
def test_multiple_choice(layout):
    model = scramble(BertForMultipleChoice(TINY))
    padded = batch(lengths=(3, 48, 17, 9, 30, 22))
    inputs = {name: padded[name].view(2, 3, -1) for name in INPUTS}
    labels = torch.tensor([2, 0])
    theirs = theirs_of(model)
    expected = theirs(**inputs, labels=labels)
    if layout == "padded":
        ours = model(**inputs, labels=labels)
    else:
        flat = {name: concatenate(padded)[name] for name in FLAT}
        ours = model(**flat, num_choices=3, labels=labels)
    check(model, ours, expected, theirs, ours.logits, expected.logits)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_a_classifier_may_read_any_pooling_in_either_layout(pooling):
    model = scramble(BertForSequenceClassification(TINY, dataclasses.replace(THREE, pooling=pooling)))
    _, inputs, flat = both_inputs()
    torch.testing.assert_close(model(**inputs).logits, model(**flat).logits, **TOLERANCE)


def test_choices_may_be_embeddings():
    model = scramble(BertForMultipleChoice(TINY))
    inputs = {name: batch(lengths=(3, 48, 17, 9, 30, 22))[name].view(2, 3, -1) for name in INPUTS}
    inputs["inputs_embeds"] = model.bert.embeddings.word(inputs.pop("input_ids"))
    theirs = theirs_of(model)
    labels = torch.tensor([2, 0])
    expected, ours = theirs(**inputs, labels=labels), model(**inputs, labels=labels)
    torch.testing.assert_close(ours.logits, expected.logits, **TOLERANCE)
    torch.testing.assert_close(ours.loss, expected.loss, **TOLERANCE)
    with pytest.raises(ModelError, match="num_choices"):
        model(inputs_embeds=inputs["inputs_embeds"][0])


CLASSES = [
    (BertModel, None),
    (BertForPreTraining, None),
    (BertForMaskedLM, None),
    (BertForNextSentencePrediction, None),
    (BertForSequenceClassification, HeadConfig(("no", "yes", "maybe"), "multi_label")),
    (BertForTokenClassification, THREE),
    (BertForMultipleChoice, HeadConfig()),
    (BertForQuestionAnswering, None),
]


@pytest.mark.parametrize("cls, head", CLASSES)
def test_every_class_goes_through_transformers_and_back(tmp_path, cls, head):
    model = scramble(cls(TINY) if head is None else cls(TINY, head)).eval()
    model.save(tmp_path / "ours")
    theirs, report = getattr(transformers, cls.__name__).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    padded = batch(lengths=(20, 20)) if cls is BertForMultipleChoice else batch()
    inputs = {name: padded[name] for name in INPUTS}
    if cls is BertForMultipleChoice:
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    ours, expected = model(**inputs), theirs.eval()(**inputs)
    named = {
        BertForPreTraining: "prediction_logits",
        BertForMaskedLM: "prediction_logits",
        BertForNextSentencePrediction: "next_sentence_logits",
    }
    scores = getattr(ours, named[cls]) if cls in named else ours[0]
    torch.testing.assert_close(scores, expected[0], **TOLERANCE)
    theirs.save_pretrained(tmp_path / "theirs")
    again = cls.from_folder(tmp_path / "theirs")
    assert not again.new_parameters and not again.training
    if head is not None and cls is not BertForMultipleChoice:
        assert again.head == dataclasses.replace(head, problem=again.head.problem)
        assert theirs.config.id2label == dict(enumerate(head.labels))
    vocabulary = ("word.weight", "decoder.weight", "decoder.bias")
    for name, tensor in model.state_dict().items():
        rows = TINY.vocab_size if name.endswith(vocabulary) else None
        assert torch.equal(tensor[:rows], again.state_dict()[name][:rows]), name


def test_an_encoder_without_a_pooler_goes_through_transformers_and_back(tmp_path):
    model = scramble(BertModel(dataclasses.replace(TINY, pooler=False))).eval()
    model.save(tmp_path / "ours")
    theirs, report = transformers.BertModel.from_pretrained(
        tmp_path / "ours", add_pooling_layer=False, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        again, inputs = BertModel.from_folder(folder), both_inputs()[2]
        assert again.config == model.config and not again.new_parameters
        torch.testing.assert_close(again(**inputs).last_hidden_state, model(**inputs).last_hidden_state, **TOLERANCE)
        assert BertModel.from_folder(folder, new_head_seed=0).new_parameters == (
            "pooler.dense.weight",
            "pooler.dense.bias",
        )


def test_a_new_head_on_a_pretrained_encoder_is_drawn_and_named(tmp_path):
    pretraining_model().save(tmp_path)
    with pytest.raises(ModelError, match="classifier"):
        BertForSequenceClassification.from_folder(tmp_path, head=THREE)
    model = BertForSequenceClassification.from_folder(tmp_path, head=THREE, new_head_seed=3)
    assert set(model.new_parameters) == {"classifier.weight", "classifier.bias"}
    assert model.classifier.weight.shape == (3, TINY.hidden_size) and model.classifier.weight.std() < 0.05
    encoder = BertModel.from_folder(tmp_path)
    torch.testing.assert_close(
        encoder(**both_inputs()[2]).last_hidden_state, model.bert(**both_inputs()[2]).last_hidden_state
    )
    model.save(tmp_path / "next")
    other = BertForSequenceClassification.from_folder(
        tmp_path / "next", head=HeadConfig(("one", "two")), new_head_seed=3
    )  # from another task, whose labels do not fit
    assert set(other.new_parameters) == {"classifier.weight", "classifier.bias"}


def test_heads_that_transformers_lacks_come_back_from_our_own_format(tmp_path):
    head = HeadConfig(
        problem="columns", columns=(("size", ("s", "m")), ("kind", ("cat", "dog", "cow"))), pooling="mean"
    )
    model = scramble(BertForSequenceClassification(TINY, head)).eval()
    model.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "cloze"
    again = BertForSequenceClassification.from_folder(tmp_path)
    assert again.head == head
    assert torch.equal(again(**both_inputs()[2]).logits, model(**both_inputs()[2]).logits)


@pytest.mark.parametrize(
    "fields",
    [
        dict(problem="columns"),
        dict(columns=(("a", ("b",)),)),
        dict(labels=()),
        dict(problem="columns", columns=(("a", ()),)),
        dict(problem="score"),
        dict(problem="multi"),
        dict(pooling="median"),
        dict(layers="first", pooling="cls"),
        dict(pieces="sum", piece_length=12, piece_step=6),
    ],
)
def test_heads_without_labels_or_of_unknown_kinds_are_refused(fields):
    with pytest.raises(ModelError, match=r"^head\."):
        HeadConfig(**fields)


def test_dropout_of_a_classifier_is_keyed_too():
    config = dataclasses.replace(TINY, classifier_dropout=0.5)
    model = scramble(BertForSequenceClassification(config, THREE)).train()
    _, _, flat = both_inputs()
    first, again, other = (model(**flat, dropout_seed=seed).logits for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(0)
    unkeyed = model(**flat).logits
    assert not torch.equal(unkeyed, model(**flat).logits)
    assert torch.equal(model.eval()(**flat).logits, model(**flat).logits)
