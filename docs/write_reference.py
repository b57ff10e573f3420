"""Write docs/reference.md from signatures and docstrings: `python docs/write_reference.py`.

It reads the sources of what it shows and imports nothing of them: the page is the same on any Python.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from cloze.pipeline.bounds import Bounds

PAGE = Path(__file__).with_name("reference.md")
# Heading -> what is in it, as module:name; behind a class those of its methods that are shown, where not all are.
PUBLIC: dict[str, tuple[str, ...]] = {
    "A model that answers": (
        "cloze:load",
        "cloze.launch.predict.predictor:Predictor",
        "cloze.launch.predict.labels:Classify",
        "cloze.launch.predict.labels:Labels",
        "cloze.launch.predict.labels:Label",
        "cloze.launch.predict.tags:TagWords",
        "cloze.launch.predict.tags:Tag",
        "cloze.launch.predict.answers:AnswerQuestion",
        "cloze.launch.predict.answers:Span",
        "cloze.launch.predict.blanks:FillMask",
        "cloze.launch.predict.blanks:Guess",
        "cloze.launch.predict.blanks:Score",
        "cloze.launch.predict.blanks:SentenceScore",
        "cloze.launch.predict.choices:Choose",
        "cloze.launch.predict.choices:Choice",
        "cloze.launch.predict.vectors:Embed",
        "cloze.launch.predict.vectors:Features",
        "cloze.launch.predict.vectors:TokenVectors",
        "cloze.launch.predict.operation:Row",
    ),
    "Shapes and models": (
        "cloze.model.config:BertConfig",
        "cloze.model.problems:HeadConfig",
        "cloze.model.bert:BertModel",
        "cloze.model.bert:BertOutput",
        "cloze.model.bert:WithPretrainingHeads",
        "cloze.model.bert:BertForPreTraining",
        "cloze.model.bert:PreTrainingOutput",
        "cloze.model.huggingface:InFolders",
        "cloze.model.initialization:init_weights",
    ),
    "Shards": (
        "cloze.pipeline.shards.reader:ShardReader",
        "cloze.pipeline.shards.manifest:Manifest load hash masked_share",
        "cloze.pipeline.loading.batches:BatchStream",
        "cloze.pipeline.loading.batches:RankBatch",
        "cloze.pipeline.records:NO_LABEL",
        "cloze.launch.system.devices:to_device",
    ),
    "Objectives and callbacks": (
        "cloze.launch.pretrain.objectives.objective:Objective",
        "cloze.launch.pretrain.objectives.objective:Term",
        "cloze.launch.training.objective:WholeBatchObjective observe",
        "cloze.launch.training.callbacks:Callback",
        "cloze.launch.training.callbacks:RunView",
    ),
    "Errors": ("cloze.pipeline.errors:UserError", "cloze.model.config:ModelError"),
}
# Where a user imports it from, if that is shorter.
SHORTER = {
    "cloze.launch.pretrain.objectives.objective": "cloze.launch.pretrain.objectives",
    "cloze.launch.predict.predictor": "cloze.launch.predict",
}
HEAD = """# Reference

Written by `python docs/write_reference.py` from signatures and docstrings; [from Python](python.md) shows their use.
What is not on this page may change without a word.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for heading, names in PUBLIC.items():
        parts.append(f"## {heading}\n")
        parts += [entry(name) for name in names]
    return "\n".join(parts)


def entry(name: str) -> str:
    """A function, a class or a constant: its signature, what it says, its fields and its methods."""
    path, _, wanted = name.partition(" ")
    module_name, _, own = path.partition(":")
    node = _defined(_source(module_name), own)
    title = f"### `{SHORTER.get(module_name, module_name)}.{own}`\n"
    if isinstance(node, ast.FunctionDef):
        return "\n".join([title, _code(_signature(node)), _text(node)])
    if not isinstance(node, ast.ClassDef):
        return "\n".join([title, _code(ast.unparse(node))])
    made = next((each for each in _functions(node) if each.name == "__init__"), None)
    head = _signature(made, own) if made else f"class {own}"
    parts = [title, _code(head), _text(node)]
    shown = set(wanted.split())
    if fields := _fields(node, _source(module_name)):
        parts += [*fields, ""]
    for method in _functions(node):
        public = not method.name.startswith("_") or method.name in ("__call__", "__iter__", "__next__")
        if public and (not shown or method.name in shown) and ast.get_docstring(method):
            kinds = {ast.unparse(each) for each in method.decorator_list}
            name = f"{own}.{method.name}" if "classmethod" in kinds else f".{method.name}"
            head = (
                f"{name}: {ast.unparse(method.returns)}"
                if "property" in kinds and method.returns
                else (_signature(method, name))
            )
            parts += [_code(head), _text(method)]
    return "\n".join(parts)


def _source(module: str) -> str:
    """Text of a module of ours."""
    place = PAGE.parents[1].joinpath(*module.split(".")[1:]) if module != "cloze" else PAGE.parents[1] / "cloze"
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return file.read_text(encoding="utf-8")


def _defined(source: str, name: str) -> ast.stmt:
    """The statement of a module that defines a name."""
    for node in ast.parse(source).body:
        targets = [ast.unparse(each) for each in getattr(node, "targets", [getattr(node, "target", None)]) if each]
        if getattr(node, "name", None) == name or name in targets:
            return node
    raise LookupError(f"{name}: found no definition of it, expected one in the module that PUBLIC names")


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _signature(node: ast.FunctionDef, name: str = "") -> str:
    """`name(arguments) -> result` without self and cls, an argument a line if it is long."""
    arguments = ast.parse(ast.unparse(node)).body[0].args
    for group in (arguments.posonlyargs, arguments.args):
        if group and group[0].arg in ("self", "cls"):
            del group[0]
            break
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name or node.name}({ast.unparse(arguments)}){result}"
    return "\n".join(textwrap.wrap(line, 110, subsequent_indent="    ", break_long_words=False))


def _fields(node: ast.ClassDef, source: str) -> list[str]:
    """Annotated fields as a list: name, kind, default, and the text below them; those of bases in its module first."""
    lines = []
    here = {each.name: each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in here:
            lines += _fields(here[base.id], source)
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
            continue
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        value, allowed = _default(field.value)
        default = f" = {ast.unparse(value)}" if value else ""
        said = f": {' '.join([*text.split(), *allowed])}" if text else ""
        lines.append(f"- `{ast.unparse(field.target)}: {ast.unparse(field.annotation)}{default}`{said}")
    return lines


def _default(value: ast.expr | None) -> tuple[ast.expr | None, list[str]]:
    """A field's default, and the sentence of the bounds in its metadata: `field(default=1, metadata=bounds(...))`."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "field":
        return value, []
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    allowed = [
        str(Bounds(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})).capitalize() + "."
        for call in ast.walk(given.get("metadata", ast.Tuple([])))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "bounds"
    ]
    return (given["default"] if "default" in given else value if "metadata" not in given else None), allowed


def _text(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The docstring; its sections and examples as they stand, since shapes are in columns there."""
    text = ast.get_docstring(node) or ""
    first, _, rest = text.partition("\n\n")
    if not rest:
        return f"{first}\n"
    return f"{first}\n\n```text\n{rest}\n```\n"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
