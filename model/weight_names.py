"""Weights by the names of `transformers`' families and by ours: what one has as a matrix another has as several."""

from collections import Counter
from operator import itemgetter

import torch
from torch import Tensor

from cloze.model.config import BertConfig, ModelError
from cloze.model.families import family_for
from cloze.model.families.family import DETECTOR, HEADS, Names, Part

StateDict = dict[str, Tensor]
POOLER = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
VOCABULARY_ROWS = ("bert.embeddings.word.weight", "masked_lm.decoder.weight", "masked_lm.decoder.bias")


def architecture_of(state_dict: StateDict) -> str:
    """The class of these weights, by the heads among them."""
    heads = {name.split(".")[0] for name in state_dict}
    if {"masked_lm", "next_sentence"} <= heads:
        return "BertForPreTraining"
    for head, architecture in (
        ("masked_lm", "BertForMaskedLM"),
        ("detection", DETECTOR),
        ("next_sentence", "BertForNextSentencePrediction"),
        ("span", "BertForQuestionAnswering"),
    ):
        if head in heads:
            return architecture
    if "classifier" in heads:
        raise ModelError("architecture: several classes have a classifier, expected its name; give architecture")
    return "BertModel"


def to_huggingface(state_dict: StateDict, config: BertConfig, architecture: str = "") -> StateDict:
    """Our weights under the names of `transformers`, without the vocabulary's padding.

    Parts that the family has no place for (`Family.dropped_prefixes`) are left out, such as RoBERTa's pooler beside a
    masked-LM head; a family that is never without segments gets one of zeros.

    Args:
        architecture: the name of our class, needed for classifiers.

    Raises:
        ModelError: a parameter has no counterpart there.
    """
    family = family_for(config)
    head = HEADS.get(architecture or architecture_of(state_dict), "")
    names, left_out = family.names(config, head), family.dropped_prefixes(head)
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in without_padding(state_dict, config).items():
        if name.startswith(left_out):
            continue
        if name not in names:
            raise ModelError(f"{name}: this parameter has no counterpart in transformers")
        sizes = [part.rows or len(tensor) // len(names[name]) for part in names[name]]
        for part, rows in zip(names[name], tensor.split(sizes), strict=True):
            parts.setdefault(part.name, []).append((part.start, rows))
    result = {
        name: torch.cat([rows for _, rows in sorted(found, key=itemgetter(0))]) if len(found) > 1 else found[0][1]
        for name, found in parts.items()
    }
    bias = family.decoder[1]
    if family.second_bias and not config.tie_word_embeddings and bias in result:
        result[family.second_bias] = result[bias]
    if family.segment_weight and not config.type_vocab_size:
        result[family.segment_weight] = next(iter(result.values())).new_zeros(1, config.embedding_width)
    return result


def from_huggingface(state_dict: StateDict, config: BertConfig, architecture: str = "") -> StateDict:
    """The inverse of `to_huggingface`; also takes the old names gamma and beta, and a bare encoder's names.

    Args:
        architecture: the class's name in config.json, which alone tells ModernBERT's span from a classifier.

    Raises:
        ModelError: for parts that are missing and for names that do not belong to the architecture.
    """
    theirs, family = {}, family_for(config)
    other = family.weight_aliases(state_dict.keys(), config)
    for name, tensor in state_dict.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        name = other.get(name, name)
        if name in theirs:
            raise ModelError(f"{name}: found it twice, under its old name too; fetch the model again")
        theirs[name] = tensor
    if family.second_bias in theirs:
        if config.tie_word_embeddings:
            _check_tied(family.second_bias, family.decoder[1], theirs)
        theirs[family.decoder[1]] = theirs[family.second_bias]
    if not any(name.startswith(family.prefix) for name in theirs):
        theirs = {family.prefix + name: tensor for name, tensor in theirs.items()}
    if not config.type_vocab_size and (segments := theirs.pop(family.segment_weight, None)) is not None:
        if segments.any():  # only zeros are as good as none
            raise ModelError(
                f"{family.segment_weight}: found shape {tuple(segments.shape)}, expected type_vocab_size = 0 of them; "
                "fix config.json, or fetch the model again"
            )
    head = family.head_of(theirs.keys(), architecture)
    result: StateDict = {}
    taken = {*family.redundant_names, family.second_bias, *family.ignored_names(head)}
    names = family.names(config, head)
    if config.tie_word_embeddings:
        (embeddings,) = names["bert.embeddings.word.weight"]
        _check_tied(family.decoder[0], embeddings.name, theirs)
        taken.add(family.decoder[0])
    _check_rows(names, theirs, config.hidden_size)
    for ours, parts in names.items():
        if any(part.name in theirs for part in parts):
            result[ours] = _joined(parts, theirs, config.hidden_size)
            taken |= {part.name for part in parts}
    if left := theirs.keys() - taken:
        raise ModelError(f"{min(left)}: found in the checkpoint, not part of the architecture ({len(left)} such names)")
    return with_padding(result, config)


def _check_tied(name: str, other: str, weights: StateDict) -> None:
    """Check that two names have the same numbers, of which config.json says that they are one parameter."""
    if name not in weights or other not in weights:
        return
    one, two = weights[name], weights[other]
    if one.shape != two.shape or not (one == two).all():  # their types may differ, which torch.equal refuses
        raise ModelError(
            f"{name}: found other numbers than in {other}, expected the same with tie_word_embeddings true in "
            "config.json; say false there if the model was trained with both"
        )


def _check_rows(names: Names, theirs: StateDict, width: int) -> None:
    """Check the shape of each tensor that is one of several parts (queries, keys, values) or divided into some:
    together parts may have the right one although none has.
    """
    rows: Counter[str] = Counter()
    for parts in names.values():
        if len(parts) > 1 or parts[0].rows:
            for part in parts:
                rows[part.name] += part.rows or width
    for name, number in rows.items():
        if name in theirs:
            expected = (number, width) if name.endswith(".weight") else (number,)
            if (found := tuple(theirs[name].shape)) != expected:
                raise ModelError(f"{name}: found shape {found}, expected {expected}; fetch the model again")


def _joined(parts: tuple[Part, ...], theirs: StateDict, width: int) -> Tensor:
    """Our parameter of its parts."""
    if missing := [part.name for part in parts if part.name not in theirs]:
        raise ModelError(f"{missing[0]}: not found in the checkpoint, which has its siblings; it is damaged")
    if len(parts) == 1 and not parts[0].rows:
        return theirs[parts[0].name]
    return torch.cat([theirs[part.name][part.start : part.start + (part.rows or width)] for part in parts])


def without_padding(state_dict: StateDict, config: BertConfig) -> StateDict:
    """Each parameter once (without a tied decoder), and the vocabulary's matrices cut to vocab_size rows."""
    result = dict(state_dict)
    if config.tie_word_embeddings and "bert.embeddings.word.weight" in result:
        result.pop("masked_lm.decoder.weight", None)
    for name in VOCABULARY_ROWS:
        if name in result:
            result[name] = result[name][: config.vocab_size]
    return result


def with_padding(state_dict: StateDict, config: BertConfig) -> StateDict:
    """The inverse of `without_padding`: rows of zeros up to padded_vocab_size, and the tied decoder again."""
    result = dict(state_dict)
    for name in VOCABULARY_ROWS:
        if name in result:
            rows = result[name]
            if rows.dim() not in (1, 2) or len(rows) != config.vocab_size:
                raise ModelError(
                    f"{name}: found shape {tuple(rows.shape)}, expected vocab_size = {config.vocab_size} rows"
                )
            missing = config.padded_vocab_size - len(rows)
            result[name] = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    bare = config.mlm_head == "linear" and not config.decoder_bias  # a head that consists only of the embeddings
    if config.tie_word_embeddings and (bare or any(name.startswith("masked_lm.") for name in result)):
        _check_tied("masked_lm.decoder.weight", "bert.embeddings.word.weight", result)
        if "bert.embeddings.word.weight" in result:  # if not, what makes the model says so
            result["masked_lm.decoder.weight"] = result["bert.embeddings.word.weight"]
    return result
