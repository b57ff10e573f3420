"""/openapi.json says what `cloze serve` answers: the answers and refusals of every operation."""

import asyncio

import httpx
import pytest
from pydantic import ValidationError

from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.table import OPERATIONS
from cloze.launch.serve.app import build_app
from cloze.launch.serve.config import ServeConfig
from cloze.launch.serve.schemas import request_model
from tests.launch.tiny_models import TAGS, labels, save_model
from tests.tables import assert_same_names

KINDS = {  # class, its fields, the operations that only it has
    "pretrained": (
        "BertForPreTraining",
        {},
        {
            "fill-mask": ["the [MASK] sat", "[MASK] [MASK]"],
            "score": ["the cat sat"],
            "embed": ["cat", "sky"],
            "similarity": [{"text": "cat", "pair": "sky"}],
            "features": ["cat", {"text": "cat", "pair": "sky"}],
            "attention": ["the cat"],
            "word": ["the cat", {"text": "cat", "pair": "a cat"}],
            "tokenize": ["cat"],
        },
    ),
    "classifier": ("BertForSequenceClassification", labels("bad", "good"), {"classify": ["cat", {"text": "sky"}]}),
    "tagger": ("BertForTokenClassification", labels(*TAGS), {"tag": ["the man went to paris and ate an apple"]}),
    "answerer": ("BertForQuestionAnswering", {}, {"answer": [{"question": "who ?", "context": "the man went"}]}),
    "chooser": ("BertForMultipleChoice", {}, {"choose": [{"text": "the", "choices": ["cat", "sky"]}]}),
}


OPTIONS = {"word": {"word": "cat"}}


def check(value, schema: dict, components: dict, place: str = "answer") -> None:
    """That a value is as a JSON schema says, and an object has no other fields."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        schema = next(each for each in schema["anyOf"] if (each["type"] == "null") == (value is None))
    kinds = {"string": str, "integer": int, "number": (int, float), "array": list, "object": dict, "null": type(None)}
    assert not schema or isinstance(value, kinds[schema["type"]]), (place, value, schema)
    if isinstance(value, dict):
        assert set(schema["required"]) <= value.keys() <= schema["properties"].keys(), (place, value.keys(), schema)
        for name, each in value.items():
            check(each, schema["properties"][name], components, f"{place}.{name}")
    elif isinstance(value, list) and schema:
        assert len(value) == schema.get("maxItems", len(value)), place
        for number, each in enumerate(value):
            check(
                each,
                schema.get("items") or schema.get("prefixItems", [{}] * len(value))[number],
                components,
                f"{place}.{number}",
            )


@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_refusals_have_the_shapes_that_are_described(tmp_path, kind):
    cls, fields, asked = KINDS[kind]
    model = Predictor.from_folder(save_model(tmp_path, cls, **fields))
    app = build_app(model, ServeConfig("model", max_body_bytes=999))

    async def ask() -> None:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            described = (await client.get("/openapi.json")).json()
            components = described["components"]["schemas"]
            assert not {"HTTPValidationError", "ValidationError"} & components.keys()
            for name, inputs in asked.items():
                responses = described["paths"][f"/{name}"]["post"]["responses"]
                assert responses.keys() == {"200", "401", "403", "408", "413", "421", "422", "503"}
                for status, given in (("200", inputs), ("422", []), ("413", ["x" * 999])):
                    answer = await client.post(f"/{name}", json={"inputs": given} | OPTIONS.get(name, {}))
                    assert str(answer.status_code) == status, answer.text
                    check(answer.json(), responses[status]["content"]["application/json"]["schema"], components)

    asyncio.run(ask())


def test_every_operation_is_checked():
    asked = {name for *_, of_kind in KINDS.values() for name in of_kind}
    assert_same_names(OPERATIONS, asked, "KINDS in this file, whose models are asked for each operation")


@pytest.mark.parametrize("inside", [False, True])
def test_so_many_unknown_fields_are_one_mistake_and_few_are_named(inside):
    """Each was noted by itself before the answer: 200,000 of them held all other requests for two seconds."""
    model = request_model(OPERATIONS["embed"].load(), ServeConfig(model="m"))

    def mistakes(count: int) -> list[dict]:
        unknown = {f"f{number}": 1 for number in range(count)}
        with pytest.raises(ValidationError) as refused:
            model.model_validate({"inputs": [{"text": "a", **unknown}]} if inside else {"inputs": ["a"], **unknown})
        return refused.value.errors()

    assert [each["loc"][-1] for each in mistakes(2)] == ["f0", "f1"]
    (mistake,) = mistakes(100_000)
    assert "found 100,001 fields, expected at most" in mistake["msg"]
    assert mistake["msg"].endswith(": text, pair" if inside else "") and ("inputs" in mistake["msg"]) != inside
