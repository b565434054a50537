"""`generate` of a wrapped model, transformers' own, with weights that come and go under it; and no cache unasked.

Blocks append to a cache of keys and values, and what they append stays on the device. Forwards of transformers take
``use_cache`` as an argument, or make a cache because a config deep inside says so.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from outsize.checkpoint.files.checkpoint_files import read_generation_config
from outsize.compat import torch_private
from outsize.inference.kv_cache import Growth

if TYPE_CHECKING:
    from outsize.wrapped.runner import Runner


_log = logging.getLogger(__name__)


def generation(kind: type[nn.Module], runner_of: Callable[[nn.Module], "Runner"]) -> Callable[..., Any]:
    """Return the method ``generate`` for the wrapped class of ``kind``."""
    own = cast(Any, kind).generate

    @wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = runner_of(self)
        with torch.no_grad(), runner.inferring(_growth(self, args, kwargs)):
            args, kwargs = on_device((args, kwargs), runner.device)
            return own(self, *args, **kwargs)

    return generate


def _growth(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Growth | None:
    """Return how far a generation goes on at most; None where it keeps no keys and values of what it writes."""
    given = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    prompt = next((value for value in given if isinstance(value, Tensor) and value.dim() >= 2), None)
    configs = [
        c for c in (kwargs.get("generation_config"), cast(Any, model).generation_config) if c is not None
    ]

    def said(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    if prompt is None or said("use_cache") is False or getattr(model.config, "is_encoder_decoder", False):
        return None
    most = said("max_length")
    num_new = said("max_new_tokens") or (most - prompt.shape[1] if most else None)
    if num_new is None or num_new < 1:
        return None
    rows = len(prompt) * max(said("num_beams") or 1, said("num_return_sequences") or 1)
    return Growth(rows, prompt.shape[1] + num_new, num_new)


def take_generation_config(model: nn.Module, directory: Path) -> None:
    """Have a model generate as its checkpoint says: the marks that end a text, how tokens are chosen.

    Raises:
        CheckpointError: what it says cannot be read.
    """
    if hasattr(model, "generation_config") and (given := read_generation_config(directory)) is not None:
        cast(Any, model).generation_config = given


@contextlib.contextmanager
def generation_config_as_it_is(model: nn.Module, directory: Any) -> Iterator[None]:
    """Save a model whose generation config transformers takes and does not write, such as a temperature of no sampling.

    It is no part of what was trained, and a save is too late to find fault with it: the file gets what was loaded.

    Args:
        model: saved while the context lasts, into
        directory: where its file is written.
    """
    from transformers import GenerationConfig

    held: Any = model
    given: Any = getattr(model, "generation_config", None)
    try:
        if given is not None:
            given.validate(strict=True)
    except ValueError as error:
        _log.info("generation_config.json is saved as it was: %s", str(error).strip().partition("\n")[0])
        held.generation_config = GenerationConfig()
        try:
            yield
        finally:
            held.generation_config = given
        path = Path(directory) / "generation_config.json"
        if path.is_file():  # as far as the save wrote one
            path.write_text(given.to_json_string(use_diff=True), encoding="utf-8")
        return
    yield


def on_device(inputs: Any, device: torch.device) -> Any:
    """Return inputs with their tensors where the model computes."""
    return torch_private.map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), inputs)


def say_without_cache(model: nn.Module) -> None:
    """Say that a model which trains goes without the cache of keys and values that a config of it asks for."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if trains and any(vars(config).get("use_cache") for config in _configs_of(model)):
        _log.info(
            "%s trains as with use_cache=False: a forward that fills a cache, as its config has it, lays keys out "
            "otherwise, and its gradients may have other last bits",
            type(model).__name__,
        )


@contextmanager
def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Have no config of ``model`` ask for a cache while the context lasts, unless the caller's ``inputs`` do."""
    asks = inputs.get("use_cache") or inputs.get("past_key_values") is not None
    asking = [] if asks else [one for one in _configs_of(model) if vars(one).get("use_cache")]
    former = [one.use_cache for one in asking]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(asking, former, strict=True):
            config.use_cache = value


def _configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of a model of transformers: its own, and those of its parts, which may be copies."""
    found: dict[int, Any] = {}
    waiting = [config for module in model.modules() if (config := vars(module).get("config")) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__"):
            found[id(config)] = config
            waiting += [
                one
                for one in vars(config).values()
                if hasattr(one, "use_cache") or hasattr(one, "to_diff_dict")
            ]
    return list(found.values())
