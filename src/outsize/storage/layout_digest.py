"""What decides where a home keeps what, as a digest: whether a file holds the state of this model, laid out as here.

The digest is over names, shapes, offsets, dtypes and planes, and over nothing else: what may be set otherwise and moves
no byte (decay, learning rates, what Muon steps) is compared in words, see `outsize.session.run_state`. It begins with a
version, which a change of the text below raises; homes of all versions so far are known.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence

from outsize.model.sizes.model_spec import FrozenPart, ModelSpec, TensorSpec, UnitSpec
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS, Plane, layout_of
from outsize.storage.home_layout import Planes, made_of

_VERSION = 2
_HEX_DIGITS = 32


def made_for(model: ModelSpec, planes: Planes | None) -> Mapping[str, Plane]:
    """Return what the planes of a home are made of; None for those of a plain layout."""
    return layout_of(model.dtype).planes if planes is None else made_of(model.dtype, planes)


def layout_digest(
    model: ModelSpec,
    planes: Planes | None = None,
    own: Sequence[range] | None = None,
    whole: Collection[str] = (WEIGHTS,),
) -> str:
    """Return a digest, a version and hexadecimal digits, of what decides where a home of ``model`` keeps what.

    Args:
        model: the units.
        planes: that it keeps; None for those of a plain layout.
        own: elements of each unit whose optimizer state it holds; None for all.
        whole: planes of which it holds all elements whatever ``own`` says.
    """
    made = made_for(model, planes)
    text = json.dumps(
        {
            "dtype": model.dtype,
            "planes": [[name, plane.item, plane.group] for name, plane in made.items()],
            "units": [_unit(unit, made) for unit in model.units],
            "own": None if own is None else [[held.start, held.stop] for held in own],
            "whole gradients": own is not None and GRADIENT in whole,
        }
    )
    return f"{_VERSION}:{_hex(text)}"


def is_laid_out(
    digest: str,
    model: ModelSpec,
    planes: Planes | None = None,
    own: Sequence[range] | None = None,
    whole: Collection[str] = (WEIGHTS,),
) -> bool:
    """Whether ``digest``, of any version, is that of a home that is laid out so; arguments as of `layout_digest`."""
    of_version = layout_digest if ":" in digest else _first_version
    return digest == of_version(model, planes, own, whole)


def _unit(unit: UnitSpec, made: Mapping[str, Plane]) -> list[object]:
    held = [name for name in made if name == WEIGHTS or unit.trainable]
    factors = {name: _tensors(made[name].tensors_of(unit)) for name in held if made[name].factor is not None}
    frozen = [
        [part.plane, part.dtype, part.codec, part.numel, part.encoded_bytes, _tensors(part.tensors)]
        for part in unit.frozen
    ]
    return [unit.name, unit.numel, held, _tensors(unit.tensors), factors, frozen]


def _tensors(tensors: Sequence[TensorSpec]) -> list[list[object]]:
    return [[tensor.name, list(tensor.shape), tensor.offset] for tensor in tensors]


def _first_version(
    model: ModelSpec, planes: Planes | None, own: Sequence[range] | None, whole: Collection[str]
) -> str:
    """The digest of homes before there was a version: over the `repr` of what described a model then, word by word."""
    plain, made = layout_of(model.dtype).planes, made_for(model, planes)
    other: list[object] = []
    if made != plain:
        other += [(name, plane.item, plane.group) for name, plane in made.items()]
    if own is not None:
        other += [list(own), "whole gradients"] if GRADIENT in whole else [list(own)]
    units = ", ".join(_unit_then(unit) for unit in model.units)
    beside = "".join(f", {each!r}" for each in other)
    return _hex(f"({model.dtype!r}, [{units}]{beside})")


def _unit_then(unit: UnitSpec) -> str:
    told = f"{unit.name!r}, {unit.numel!r}, {unit.trainable!r}, {_tuple(map(_tensor_then, unit.tensors))}"
    return f"({told}, {_tuple(map(_part_then, unit.frozen))})" if unit.frozen else f"({told})"


def _tensor_then(tensor: TensorSpec) -> str:
    return (
        f"TensorSpec(name={tensor.name!r}, shape={tensor.shape!r}, offset={tensor.offset!r}, "
        f"trainable={tensor.trainable!r}, decay={tensor.decay!r}, lr_scale={tensor.lr_scale!r}, muon={tensor.muon!r})"
    )


def _part_then(part: FrozenPart) -> str:
    return (
        f"FrozenPart(plane={part.plane!r}, dtype={part.dtype!r}, tensors={_tuple(map(_tensor_then, part.tensors))}, "
        f"numel={part.numel!r}, codec={part.codec!r}, encoded_bytes={part.encoded_bytes!r})"
    )


def _tuple(texts: Iterable[str]) -> str:
    """The `repr` of a tuple whose members have these."""
    members = list(texts)
    return f"({members[0]},)" if len(members) == 1 else f"({', '.join(members)})"


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]
