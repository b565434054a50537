"""Parameters that lie in one memory with other tensors of a model, which units of outsize could not: told by name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outsize.compat.torch_private import as_plain_tensors, has_no_bytes, memory_key, parameters_of
from outsize.errors import ModelError

# Where modules keep what is registered.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Memory of a tensor of a model.

    Attributes:
        name: of the tensor, for messages.
        device: whose memory it is.
        elements: the memory as numpy sees it; none of it is read.
        start: its first address.
        stop: the address behind its last element.
        trains: whether steps change it.
        is_parameter: whether it is a parameter, which moves home.
    """

    name: str
    device: str
    elements: np.ndarray[Any, Any]
    start: int
    stop: int
    trains: bool
    is_parameter: bool


def check_memory(
    model: nn.Module, assigned: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[tuple[str, str], ...]:
    """Check that each parameter lies alone in its memory, as it will at home, and is where modules look it up.

    Args:
        model: any.
        assigned: what parameters without bytes were assigned by the program, by their names.

    Returns:
        Frozen parameters that share memory, and what with: equal at home as long as nothing changes them.

    Raises:
        ModelError: one that trains shares memory, or a module holds one where it is not registered.
    """
    with as_plain_tensors():
        stretches = list(_stretches_of(model, assigned))
    return tuple(
        _check_pair(*sorted(pair, key=lambda each: not each.is_parameter)) for pair in _pairs(stretches)
    )


def check_apart(tensors: Mapping[str, Tensor], what: str) -> None:
    """Check that tensors of a kind, by the names of their parameters, lie apart.

    Args:
        tensors: by name; those without bytes are left out.
        what: the kind, for the message.

    Raises:
        ModelError: two lie in one memory.
    """
    for one, other in _pairs(
        [_stretch(name, tensor, is_parameter=True, trains=True) for name, tensor in tensors.items()]
    ):
        raise ModelError(
            f"{what}: those of {one.name} and {other.name} lie in one memory, where both would be changed: give each "
            "its own (tensor.clone())"
        )


def _pairs(stretches: Iterable[_Stretch | None]) -> Iterator[tuple[_Stretch, _Stretch]]:
    """Yield what lies in one memory, if one of the two is a parameter."""
    reaching: list[_Stretch] = []  # beyond where the next one begins
    in_order = sorted((each for each in stretches if each), key=lambda each: (each.device, each.start))
    for one in in_order:
        reaching = [other for other in reaching if other.device == one.device and other.stop > one.start]
        for other in reaching:
            if (one.is_parameter or other.is_parameter) and _overlap(other, one):
                yield other, one
        reaching.append(one)


def _stretches_of(model: nn.Module, assigned: Mapping[str, Tensor]) -> Iterator[_Stretch | None]:
    """Yield the memory of all that a model holds."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        place = assigned.get(name, parameter)
        yield _stretch(name, place, is_parameter=True, trains=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        yield _stretch(f"the buffer {name}", buffer)
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _REGISTERED or (isinstance(module, nn.RNNBase) and attribute == "_flat_weights"):
                continue
            # Made anew by a hook in each forward: `spectral_norm`.
            if f"{attribute}_orig" in parameters_of(module):
                continue
            name = f"{path}.{attribute}" if path else attribute
            for tensor in _tensors_in(value):
                if id(tensor) in names:
                    raise ModelError(
                        f"{name} holds the parameter {names[id(tensor)]} where it is not registered, and would go on "
                        "with the weights of before: look it up in its module in each forward, or hold that module"
                    )
                yield _stretch(f"the tensor {name}", tensor)


def _stretch(
    name: str, tensor: Tensor, *, is_parameter: bool = False, trains: bool = False
) -> _Stretch | None:
    """Return the memory of a tensor, None where it has none of its own."""
    if has_no_bytes(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return None
    size, device = tensor.element_size(), str(tensor.device)
    start = tensor.data_ptr()
    if tensor.is_meta:  # a skeleton's: where they would lie
        start, device = 1 + size * int(tensor.storage_offset()), f"meta {memory_key(tensor)}"
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if trains and last + 1 < tensor.numel():
        raise ModelError(
            f"{name} trains, and several of its elements are one (expand): torch cannot step it either; give each "
            "memory of its own, parameter.data = parameter.data.contiguous()"
        )
    form = {"shape": tuple(tensor.shape), "strides": tuple(size * stride for stride in tensor.stride())}
    memory = {"data": (start, False), "typestr": f"|V{size}", "version": 3, **form}
    elements = np.asarray(type("Memory", (), {"__array_interface__": memory}))
    stop = start + (last + 1) * size
    return _Stretch(name, device, elements, start, stop, trains, is_parameter) if start else None


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors that a value holds, also in containers of Python's."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict | list | tuple | set):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(inner, depth - 1)


def _overlap(one: _Stretch, other: _Stretch) -> bool:
    try:
        return np.shares_memory(one.elements, other.elements, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _check_pair(parameter: _Stretch, other: _Stretch) -> tuple[str, str]:
    """Return the names of a parameter and of what lies in its memory."""
    if not (parameter.trains or other.trains):
        return parameter.name, other.name
    trained = parameter.name if parameter.trains else other.name
    raise ModelError(
        f"{parameter.name} and {other.name} lie in one memory, and {trained} trains: outsize moves each parameter, and "
        "they would be two from then on. Make them one parameter (b.weight = a.weight), or give each memory of its own "
        "(b.weight = torch.nn.Parameter(a.weight.detach().clone()), b.weight.data = a.weight.data.clone())"
    )
