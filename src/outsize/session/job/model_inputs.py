"""Inputs that a model is called with, and a loss function that the user names."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.config import Config
from outsize.data.batch import IGNORED, Batch
from outsize.errors import ConfigError, ModelError


def num_targets(batch: Batch, shifted: bool) -> int:
    """Tokens that a model's loss is a mean over; a model that predicts the token in its place shifts nothing."""
    return batch.num_target_tokens if shifted else int((batch.labels != IGNORED).sum())


def made_up_inputs(config: Config, hf_config: Any, num_sequences: int, seq_len: int) -> dict[str, Tensor]:
    """A microbatch of random tokens, such as training will see: ids and labels [num_sequences, seq_len], and a mask.

    Something is padded where anything may be, and there are two documents where there may be several: models of
    transformers make a mask only where they need one.
    """
    vocabulary = hf_config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (num_sequences, seq_len), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    if config.data.pack == "none":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][:, max(seq_len - 1, 1) :] = 0
    elif config.data.pack == "documents":
        inputs["position_ids"] = (torch.arange(seq_len) % max(seq_len // 2, 1)).expand_as(ids)
    return inputs


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
        cast(Any, model).loss_function = NamedLoss(_function(name))


def check_loss(model: nn.Module) -> None:
    """Check, once a microbatch was tried, that the model has asked the function that it was to take its loss from.

    Raises:
        ModelError: it takes its loss otherwise.
    """
    found = getattr(model, "loss_function", None)
    if isinstance(found, NamedLoss) and not found.was_called:
        raise ModelError(
            f"train.loss_function: {type(model).__name__} takes its loss otherwise; leave it out, or write a loop with "
            "outsize.wrap"
        )


def _function(name: str) -> Callable[..., Tensor]:
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"train.loss_function: {name!r} is to be FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(f"train.loss_function: {place} cannot be loaded: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"train.loss_function: {place} has no function {attribute!r}")
    return cast(Callable[..., Tensor], found)


def _from_file(path: Path) -> ModuleType:
    name = f"outsize_loss_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
