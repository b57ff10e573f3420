"""Requests and responses as pydantic models, which validate requests and describe /openapi.json."""

import dataclasses
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from docstring_parser import parse_from_object
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    create_model,
    model_validator,
)

from cloze.launch.predict.operation import Operation
from cloze.launch.serve.config import ServeConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# Unknown fields of an object that are named one by one. Pydantic notes each, in the event loop: 200,000 took 2 s.
_MOST_UNKNOWN = 16


class Refusal(BaseModel):
    """The response of a refused request: the reason."""

    detail: str
    """One line."""


def request_model(operation: type[Operation], config: ServeConfig) -> type[BaseModel]:
    """Model of an operation's request: inputs, and options with their descriptions. A single text becomes an object."""
    strict = ConfigDict(extra="forbid")
    text = Annotated[str, StringConstraints(max_length=config.max_characters)]
    name, first = operation.__name__, operation.fields[0]
    parts = _texts(operation, text, Annotated[list[text], Field(max_length=config.max_texts)])
    entry: Any = create_model(f"{name}Input", __config__=strict, __validators__=_of_few(parts), **parts)
    if operation.takes_pair != "always" and not operation.takes_choices:
        entry = Annotated[
            entry,
            BeforeValidator(
                lambda given: {first: given} if isinstance(given, str) else given, json_schema_input_type=text | entry
            ),
        ]
    docs = _sentences(operation)
    options: Fields = {
        field.name: (_strictly(field.type), _described(field, docs)) for field in dataclasses.fields(operation)
    }
    inputs = (list[entry], Field(min_length=1, max_length=config.max_texts, description="Texts, or objects of texts."))
    asked: Fields = {"inputs": inputs} | options
    return create_model(f"{name}Request", __config__=strict, __validators__=_of_few(asked), **asked)


def _strictly(kind: Any) -> Any:
    """The type without pydantic's conversions, by which `true` is layer 1."""
    chosen: Any = Literal
    return kind if chosen in [get_origin(each) for each in (kind, *get_args(kind))] else Annotated[kind, Strict()]


def _of_few(known: Fields) -> Fields:
    """The validators of an object that may have some more fields than the known ones, each of which is then named."""
    most = len(known) + _MOST_UNKNOWN

    def few(given: object) -> object:
        if isinstance(given, dict) and len(given) > most:
            raise UserError(f"found {len(given):,} fields, expected at most {len(known)}: {', '.join(known)}")
        return given

    return {"few": model_validator(mode="before")(few)}


def answer_model(operation: type[Operation]) -> type[BaseModel]:
    """Model of an operation's response: `results`, each with its texts and the result."""
    name, parts = operation.__name__, _texts(operation, str, list[str])
    kind = get_type_hints(operation.finish)["return"]
    parts |= _fields(kind) if dataclasses.is_dataclass(kind) else {operation.key: (_as_json(kind), ...)}
    result: Any = create_model(f"{name}Result", **parts)
    fields: Fields = {"results": (list[result], ...)}
    return create_model(f"{name}Answer", **fields)


def _texts(operation: type[Operation], text: Any, choices: Any) -> Fields:
    """The fields of an operation's one or two texts, of these types."""
    first, second = operation.fields
    if operation.takes_choices:
        return {first: (text, ...), second: (choices, ...)}
    seconds: Fields = {"never": {}, "maybe": {second: (text | None, None)}, "always": {second: (text, ...)}}
    return {first: (text, ...)} | seconds[operation.takes_pair]


def _as_json(kind: object) -> object:
    """The type of the JSON value to which `launch.predict.operation.plain` converts a value of this type."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return create_model(kind.__name__, __doc__=kind.__doc__, **_fields(kind))
    if get_origin(kind) is list:
        item: Any = _as_json(*get_args(kind))
        return list[item]
    return list if kind is np.ndarray else kind


def _fields(kind: Any) -> Fields:
    docs = _sentences(kind)
    return {field.name: (_as_json(field.type), _described(field, docs)) for field in dataclasses.fields(kind)}


def _described(field: dataclasses.Field[Any], docs: dict[str, str | None]) -> Any:
    default = ... if field.default is dataclasses.MISSING else field.default
    return Field(default, description=docs.get(field.name))


def _sentences(kind: type) -> dict[str, str | None]:
    """The description of each field: the docstring below it in the class that declares it."""
    return {doc.arg_name: doc.description for each in kind.__mro__[:-1] for doc in parse_from_object(each).params}
