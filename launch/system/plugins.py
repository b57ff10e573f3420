"""Loads a user's own classes by their dotted names, from a file in the current folder or an installed package."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, TypeVar

from cloze.pipeline.errors import UserError

Kind = TypeVar("Kind")


def own_class(field: str, name: str, base: type[Kind], *attributes: str) -> type[Kind]:
    """Import the class `name`, which must be a subclass of `base`.

    The current folder is searched last, so that a file in it hides nothing that is installed.

    Args:
        field: field of the configuration, for messages.
        attributes: names that the class must define besides the abstract methods of `base`.

    Raises:
        UserError: no such module or class, a module that fails, another kind of class, or one that lacks something.
    """
    module_name, _, class_name = name.rpartition(".")
    if not (module_name and class_name):
        raise UserError(
            f"{field}: found {name!r}, expected the dotted name of a class with its module, as "
            "my_module.MyClass for a class in my_module.py"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    module = _module(field, name, module_name)
    where = getattr(module, "__file__", None) or module_name
    kind = getattr(module, class_name, None)
    if kind is None:
        raise UserError(f"{field}: found {name!r}, but no {class_name} in {where}, expected a class of that name")
    if not inspect.isclass(kind):
        raise UserError(f"{field}: found {name!r} of type {type(kind).__name__} in {where}, expected a class")
    if not issubclass(kind, base):
        raise UserError(
            f"{field}: found {name!r}, a class that is no {base.__name__}, expected a subclass of "
            f"{base.__module__}.{base.__name__}"
        )
    lacking = sorted(getattr(kind, "__abstractmethods__", ())) + [
        each for each in attributes if not hasattr(kind, each)
    ]
    if lacking:
        raise UserError(
            f"{field}: found {name!r} in {where} without {', '.join(lacking)}, expected what every "
            f"{base.__name__} has; see docs/python.md"
        )
    return kind


def _module(field: str, name: str, module_name: str) -> object:
    try:
        return importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: an empty name, as of ".MyClass"
        missing = getattr(error, "name", None) or module_name
        if not (module_name == missing or module_name.startswith(f"{missing}.")):
            raise UserError(
                f"{field}: found {name!r}, whose module {module_name} needs {missing}, which is not "
                "installed, expected a module that can be imported"
            ) from error
        raise UserError(
            f"{field}: found {name!r}, but no module {missing} in {os.getcwd()} or among what is "
            "installed, expected the dotted name of a class, as my_module.MyClass for a class in "
            "my_module.py"
        ) from error
    except Exception as error:  # any error that a user's module raises when it is imported
        raise UserError(f"{field}: found {name!r}, whose module fails{_place(error)}: {_said(error)}") from error


def make(field: str, name: str, kind: type[Kind], config: object, options: Mapping[str, object]) -> Kind:
    """Make an instance of a class that `own_class` returned.

    Raises:
        UserError: it does not take the options.
    """
    try:
        inspect.signature(kind).bind(config, **options)
    except TypeError as error:
        raise UserError(
            f"{field}: found {name!r} with {field}_options {dict(options)}, expected those that its "
            f"constructor takes: {error}"
        ) from error
    constructor: Any = kind
    return constructor(config, **options)


def _place(error: Exception) -> str:
    """Where an error was raised, as file and line."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _said(error: Exception) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}".rstrip(": ")
