"""What a class of torch keeps of a parameter, and whether a run can step by it, tried on tiny tensors.

Each parameter is stepped by itself, with a state that is taken from planes and put back, and what comes out must be
bit for bit what one object of the class makes of all of them. Where pieces of a parameter step as the whole does, units
step in tiles of any size; where they do not (a norm of the parameter, rows and columns, a number for each), units step
whole. Bits are those of the class on fp32 parameters, as its ``foreach`` or ``fused`` says.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outsize.errors import ConfigError
from outsize.optim.optimizer_names import OWN, Factor, factor_shape
from outsize.optim.torch_class import (
    ANY_LR,
    Count,
    Entry,
    Optimizer,
    Stepper,
    TorchClass,
    as_torch_takes,
    find_class,
)

# Rates of tries; so many steps tell what a class does.
_ANY_DECAY, _TRIES = 0.1, 4
_SHAPES = ((3, 5), (4,), (2, 3, 5))
# The one whose pieces are stepped by themselves: more than a vector register and its tail.
_LONG, _PIECE = (31, 33), 7
_SETTINGS = {"lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay"}


def torch_class(name: str, arguments: Mapping[str, Any] | None = None) -> TorchClass:
    """Return what is known of the class that ``optimizer.name`` means, tried on tiny tensors.

    Raises:
        ConfigError: it does not take these arguments, or no run can step by it.
    """
    return _tried(name, json.dumps(arguments or {}, sort_keys=True))


@lru_cache(maxsize=64)
def _tried(name: str, arguments: str) -> TorchClass:
    cls = find_class(name)
    given = as_torch_takes(json.loads(arguments))
    parameters = _arguments_of(cls)
    of_torch = getattr(torch.optim, cls.__name__, None) is cls
    shown = f"torch.optim.{cls.__name__}" if of_torch else f"{cls.__module__}.{cls.__qualname__}"
    for key in given:
        if key in _SETTINGS:
            raise ConfigError(f"optimizer.args: {key} is said in {_SETTINGS[key]}; leave it out here")
        if parameters is not None and key not in parameters:
            others = ", ".join(sorted(parameters - {*_SETTINGS}))
            raise ConfigError(f"optimizer.args: {cls.__name__} takes no {key}; it takes {others}")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer.name: {cls.__name__} calls the model several times in a step (it needs a closure), and a "
            "streamed step is one pass; use another, e.g. adamw"
        )
    try:
        return _looked_at(
            shown, cls, arguments, given, decays=parameters is None or "weight_decay" in parameters
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        hint = f"; outsize has optimizer.name={cls.__name__.lower()}" if cls.__name__.lower() in OWN else ""
        raise ConfigError(f"optimizer.args: {cls.__name__} refuses them: {error}{hint}") from error
    except Exception as error:  # whatever code of others raises
        raise ConfigError(
            f"optimizer.name: {cls.__name__} does not step ordinary parameters by themselves: {error}"
        ) from error


def _looked_at(
    path: str, cls: type[Optimizer], arguments: str, given: dict[str, Any], *, decays: bool
) -> TorchClass:
    """Try a class: what it keeps, and whether it steps the same from planes."""
    tensors, gradients = _random(_SHAPES)
    plain = cls([tensor.clone() for tensor in tensors], lr=ANY_LR, **given)  # type: ignore[call-arg]
    followed = plain.param_groups[0]["params"]
    states = []
    for number, gradient in enumerate(gradients, 1):
        _step(plain, followed, gradient, number)
        states.append([_copied(plain.state[parameter]) for parameter in followed])
    count = _count_in(states)
    entries = _entries(cls, followed, states, count)
    description = TorchClass(
        path=path, arguments=arguments, entries=entries, count=count, by_element=False, decays=decays
    )
    ours = [
        _stepped(description, tensor.clone(), [each[i] for each in gradients])
        for i, tensor in enumerate(tensors)
    ]
    if not all(map(torch.equal, ours, followed)):
        raise ConfigError(
            f"optimizer.name: {cls.__name__} steps a parameter otherwise beside others than by itself, or keeps what "
            "is not in its state, and units come one after the other; use another, e.g. adamw"
        )
    if any(entry.factor is not None or entry.number for entry in entries):
        return description
    return replace(description, by_element=_is_by_element(description))


def _is_by_element(description: TorchClass) -> bool:
    """Whether pieces that are all tail step as the whole does."""
    ((long,), gradients) = _random((_LONG,))
    flat = long.clone().view(-1)
    pieces = [
        _stepped(description, piece, [gradient[0].view(-1)[start : start + _PIECE] for gradient in gradients])
        for start, piece in (
            (start, flat[start : start + _PIECE]) for start in range(0, flat.numel(), _PIECE)
        )
    ]
    return torch.equal(
        torch.cat(pieces), _stepped(description, long, [each[0] for each in gradients]).view(-1)
    )


def _stepped(description: TorchClass, tensor: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return ``tensor`` after steps whose state lies in flat memory between them."""
    stepper = Stepper(description, _ANY_DECAY)
    of = tuple(tensor.shape)
    shapes = [of if entry.factor is None else factor_shape(of, entry.factor) for entry in description.entries]
    state = [None if shape is None else torch.zeros(shape) for shape in shapes]
    for number, gradient in enumerate(gradients, 1):
        stepper.step(tensor, gradient.clone(), state, number, _lr_of(number), 1.0)
    return tensor


def _step(
    optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor], number: int
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = _lr_of(number)
        if "weight_decay" in group:
            group["weight_decay"] = _ANY_DECAY
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _lr_of(number: int) -> float:
    return ANY_LR * number


def _random(shapes: Sequence[tuple[int, ...]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return tensors of these shapes, and as many gradients of each as there are tries."""
    source = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=source) for shape in shapes]

    return draw(), [draw() for _ in range(_TRIES)]


def _count_in(states: Sequence[Sequence[Mapping[str, Any]]]) -> Count | None:
    """Return what holds the number of updates: what is 1, 2, 3 … after each."""
    for key, value in states[0][0].items():
        values = [of[key] for state in states for of in state if key in of]
        expected = [number for number, state in enumerate(states, 1) for _ in state]
        if all(_is_number(each) for each in values) and [float(each) for each in values] == expected:
            return Count(key, value.dtype if isinstance(value, Tensor) else None)
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _entries(
    cls: type[Optimizer],
    parameters: Sequence[Tensor],
    states: Sequence[Sequence[Mapping[str, Any]]],
    count: Count | None,
) -> tuple[Entry, ...]:
    """Return what is kept beside the count, and refuse what planes cannot hold."""
    skip = {count.key} if count else set()
    held = [
        [{k: v for k, v in of.items() if v is not None and k not in skip} for of in state] for state in states
    ]
    if any(state[i].keys() != held[0][i].keys() for state in held for i in range(len(state))):
        raise ConfigError(
            f"optimizer.name: {cls.__name__} begins part of its state after the first update; use another, e.g. adamw"
        )
    entries = []
    for key in dict.fromkeys(key for of in held[0] for key in of):
        values = [of.get(key) for of in held[0]]
        numbers = [v for state in held for of in state if (v := of.get(key)) is not None]
        number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers)
        plain = all(isinstance(v, Tensor) and v.dtype is torch.float32 for v in numbers)
        shapes = [None if v is None else () if number else tuple(getattr(v, "shape", ())) for v in values]
        factor = _factor_of([tuple(p.shape) for p in parameters], shapes)
        if not (number or plain) or factor is None:
            what = sorted({str(v.dtype) if isinstance(v, Tensor) else type(v).__name__ for v in numbers})
            raise ConfigError(
                f"optimizer.name: {cls.__name__} keeps {key} ({', '.join(what)}), which no plane of a home holds; use "
                "another, e.g. adamw"
            )
        entries.append(Entry(key, None if factor == "full/full" else factor, number))
    return tuple(entries)


def _factor_of(
    parameters: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...] | None]
) -> Factor | None:
    """Return the factor that gives parameters of these shapes state of those; None where there is none."""
    kinds = ("full", "scalar", "one", "none")
    for matrix in (*kinds, "rows", "columns", "row", "column"):
        for vector in kinds:
            factor = f"{matrix}/{vector}"
            if all(factor_shape(of, factor) == shape for of, shape in zip(parameters, shapes, strict=True)):
                return factor
    return None


def _arguments_of(cls: type[Optimizer]) -> set[str] | None:
    """Return the arguments of a class, without its parameters; None where it takes any."""
    parameters = list(inspect.signature(cls).parameters.values())
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters[1:]}
