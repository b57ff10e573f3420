"""Rotary positions in a config.json: their base, and what is not computed here."""

from collections.abc import Mapping

from cloze.model.config import ModelError
from cloze.model.families.family import Json


def rotary_bases(values: Json, bases: Mapping[str, float]) -> dict[str, float]:
    """Base of the rotary frequencies by kind of layer.

    Args:
        bases: those where neither `rope_scaling` nor `rope_parameters` has one.

    Raises:
        ModelError: for scaled frequencies, for heads of which a part is rotated, and for both fields, of which
            transformers reads the first alone.
    """
    for field in ("rope_scaling", "rope_parameters"):
        given = values.get(field) or {}
        layers = {layer: given.get(layer) or {} for layer in bases}
        for rope in (given, *layers.values()):
            kind = rope.get("rope_type") or rope.get("type") or "default"
            if kind != "default":
                raise ModelError(
                    f"config.json: found rope_type {kind!r} in {field}, expected default: scaled rotary "
                    "positions are not computed here; take a model without them"
                )
            if (share := rope.get("partial_rotary_factor", 1)) != 1:
                raise ModelError(f"config.json: found partial_rotary_factor {share} in {field}, expected 1")
        shared = given.get("rope_theta")
        bases = {layer: layers[layer].get("rope_theta", shared or base) for layer, base in bases.items()}
    if values.get("rope_scaling") and values.get("rope_parameters") not in (None, {}, values["rope_scaling"]):
        raise ModelError(
            "config.json: found rope_scaling beside other rope_parameters, expected one of the two; remove the one "
            "with which the model was not trained"
        )
    return dict(bases)


def rotary_base(values: Json, base: float) -> float:
    """The base of all layers, `base` where config.json has none.

    Raises:
        ModelError: as `rotary_bases`, and for heads of another size than those of the hidden size.
    """
    heads, hidden = values.get("num_attention_heads", 12), values.get("hidden_size", 768)
    if (size := values.get("head_dim")) is not None and size * heads != hidden:
        raise ModelError(
            f"config.json: found head_dim {size} with num_attention_heads {heads}, expected hidden_size {hidden} / "
            f"{heads}"
        )
    return rotary_bases(values, {"": values.get("rope_theta", base)})[""]


def rotary_fields(base: float) -> Json:
    """The field of a config.json with one base for all layers."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
