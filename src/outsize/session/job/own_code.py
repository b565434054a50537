"""Load what a configuration names of the user's own code: a loss, and the program of a step."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor, nn

from outsize.errors import ConfigError, ModelError


class NamedLoss:
    """Calls a function of logits and labels.

    Attributes:
        was_called: whether a model has asked for it.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self.was_called = False

    def __call__(self, logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
        """Return the loss of a microbatch; ``more`` is what transformers gives besides."""
        self.was_called = True
        return self._function(logits, labels)


def take_loss(model: nn.Module, name: str | None) -> None:
    """Have ``model`` take its loss from the function called ``name``, where there is one.

    Raises:
        ConfigError: there is no such function.
    """
    if name is not None:
        cast(Any, model).loss_function = NamedLoss(function_named("train.loss_function", name))


def check_loss(model: nn.Module) -> None:
    """Check, once a microbatch was tried, that the model has asked the function that it was to take its loss from.

    Raises:
        ModelError: it takes its loss otherwise.
    """
    function = getattr(model, "loss_function", None)
    if isinstance(function, NamedLoss) and not function.was_called:
        raise ModelError(
            f"train.loss_function: {type(model).__name__} takes its loss otherwise; leave it out, or write a loop with "
            "outsize.wrap"
        )


def program_named(name: str) -> Callable[[str], str]:
    """Return what makes the program to walk of the text of a plan's: a function's words, or those of a file.

    Raises:
        ConfigError: there is no such function or file, or no program in it.
    """
    if ":" in name:
        return function_named("train.program", name)
    try:
        text = Path(name).read_text()
        text = "\n".join(json.loads(text)["program"]) if name.endswith(".json") else text
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"train.program: {name} holds no program: {type(error).__name__}: {error}"
        ) from error
    return lambda _: text


def function_named(key: str, name: str) -> Callable[..., Any]:
    """Return the function that the value of ``key`` names, or raise a ConfigError."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"{key}: {name!r} is to be FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(f"{key}: {place} cannot be loaded: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{key}: {place} has no function {attribute!r}")
    return cast(Callable[..., Any], function)


def _from_file(path: Path) -> ModuleType:
    name = f"outsize_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
