"""Tensors that rest where torch cannot see them, on disk or written by a codec, and yet do what tensors do.

An `AtRest` has shape, strides and dtype, and no bytes. Every operation on it says by its schema what it does: one that
looks at part of it gives another `AtRest`, which remembers how to look; one that reads it reads it from home, as a
tensor of its own that nobody keeps; one that writes it writes it home. What goes past operations is read alone, or
refused: numpy's arrays cannot be written to, and storage is a copy.
"""

import copy
import sys
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import formed_like, no_function_override, schema_of
from outsize.errors import ConfigError

# How a part is seen: an operation, its arguments but for the first, and which of several results.
_View = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]


_ONE_HOLDER = (
    2  # what `sys.getrefcount` counts of a place that one tensor has: its attribute, and the argument
)


class Place(Protocol):
    """Where one tensor rests."""

    @property
    def key(self) -> object:
        """What two places of the same tensor have in common."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""

    def read(self) -> Tensor:
        """Return a copy of the tensor, once no step is under way."""

    def write(self, value: Tensor) -> None:
        """Replace the tensor."""

    def scale(self, factor: Tensor) -> bool:
        """Note that the tensor is multiplied by a scalar; False where that must be done at once."""

    def show(self) -> Tensor:
        """Return a copy that all who look at it share as long as anybody holds it, filled anew."""

    def part(self) -> None:
        """Keep a copy of the tensor from now on, and leave what is at home to others."""

    def unlink(self) -> None:
        """Let go of what the program holds of the tensor, see `link`."""

    def link(self, value: Tensor) -> None:
        """Have the tensor lie in ``value`` as well, as long as the program holds that."""


class AtRest(torch.Tensor):
    """A tensor without bytes; see above. Arguments: where it rests, and how a part of that is seen."""

    __torch_function__ = no_function_override()
    _is_param = False
    _place: Place
    _views: tuple[_View, ...]
    _shown: Tensor | None

    @staticmethod
    def __new__(
        cls,
        place: Place,
        views: tuple[_View, ...] = (),
        *,
        parameter: bool = False,
        requires_grad: bool = True,
    ) -> "AtRest":
        """Return the tensor that rests at ``place``, or a part of it; as a parameter where asked.

        Whoever makes a parameter of the class of another one (accelerate) gives a tensor, and gets an ordinary one.
        """
        if isinstance(place, Tensor):
            return cast("AtRest", nn.Parameter(place, requires_grad))
        form = _seen(torch.empty(place.shape, dtype=place.dtype, device="meta"), views)
        made: AtRest = formed_like(cls, form, torch.device("cpu"))
        made._place, made._views, made._shown = place, views, None
        if parameter:
            made._is_param = True  # what `isinstance(…, nn.Parameter)` asks for
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look, read or write, as the schema of the operation says."""
        kwargs = kwargs or {}
        if any(result.alias_info and not result.alias_info.is_write for result in schema_of(func).returns):
            return _part(func, args, kwargs)
        if func is torch.ops.aten.mul_.Tensor and _scales(args[0], args[1]):
            return args[0]
        if schema_of(func).name.startswith("aten::_foreach_"):
            return _one_by_one(func, args, kwargs)
        return _compute(func, args, kwargs)

    @property
    def data(self) -> Tensor:
        """The tensor without a history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        value_home = value_to_assign(self.detach(), value)
        if value_home is None:
            return
        if self._views:  # a tensor apart from the one that it was seen through, which stays as it is
            self._place = copy.copy(self._place)
            self._place.part()
        elif sys.getrefcount(self._place) > _ONE_HOLDER:  # whoever else looks there keeps what was
            former, self._place = self._place, copy.copy(self._place)
            former.part()
        self._place.unlink()
        with torch.no_grad():
            self.detach().copy_(value_home)
        self._place.link(value)

    def moved(self, place: Place) -> None:
        """Rest at ``place`` from now on."""
        self._place, self._shown = place, None

    @property
    def place(self) -> Place:
        """Place of the tensor at home, all or part of which this one shows."""
        return self._place

    def rests_at(self, key: object) -> bool:
        """Whether this is the tensor of that place, and all of it."""
        return not self._views and self._place.key == key

    def value(self) -> Tensor:
        """Return a copy that is in memory, without a history."""
        return _seen(self._place.read(), self._views)

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array that cannot be written to."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a tensor that requires grad: use tensor.detach().numpy()")
        array = self.value().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """See `torch.Tensor.tolist`."""
        return self.value().tolist()

    def data_ptr(self) -> int:
        """Where a copy lies, for as long as this tensor is there."""
        return self._copy().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of that copy."""
        return self._copy().untyped_storage()

    def storage(self) -> Any:
        """See `untyped_storage`."""
        return self._copy().storage()  # type: ignore[no-untyped-call]

    def _typed_storage(self) -> Any:
        return self._copy()._typed_storage()  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        form = f"{tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad}"
        return f"{type(self).__name__}({form}; the bytes rest at home)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = self._plain()
        return made

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        raise ConfigError("this tensor rests at home, and has no bytes to share: share tensor.clone()")

    def share_memory_(self) -> NoReturn:
        """Refuse."""
        raise ConfigError("this tensor rests at home, and has no bytes to share: share tensor.clone()")

    def _plain(self) -> Tensor:
        value = self.value()
        if self._is_param:
            return nn.Parameter(value, requires_grad=self.requires_grad)
        return value.requires_grad_(self.requires_grad)

    def _copy(self) -> Tensor:
        base = self._shown = self._place.show()
        return _seen(base, self._views)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bytes in the same order."""
    if isinstance(one, AtRest) and isinstance(other, AtRest):
        return (one._place.key, one._views) == (other._place.key, other._views)
    return _geometry(one) == _geometry(other) and one.dtype == other.dtype


def value_to_assign(own: Tensor, value: Tensor) -> Tensor | None:
    """Return what is to be copied home for ``own.data = value``; None where it is that tensor already.

    Raises:
        ConfigError: it has another shape or dtype, for which there is no room.
    """
    if is_same(own, value):
        return None
    if own.shape != value.shape or own.dtype != value.dtype:
        raise ConfigError(
            f"parameter.data = {_form(value)}, over {_form(own)} of a wrapped model: its home has room for that shape "
            "and dtype alone. Change the model before outsize.wrap, or outsize.unwrap it first"
        )
    return value.detach().clone() if _share_memory(own, value) else value


def _share_memory(own: Tensor, value: Tensor) -> bool:
    """Whether a value lies where it is to go, in another order, as ``parameter.data.t()`` does."""
    if isinstance(own, AtRest) or isinstance(value, AtRest):
        return isinstance(own, AtRest) and isinstance(value, AtRest) and own._place.key == value._place.key
    return own.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _seen(base: Tensor, views: tuple[_View, ...]) -> Tensor:
    with torch.no_grad():
        for func, args, kwargs, which in views:
            found = func(base, *args, **kwargs)
            base = found if which is None else found[which]
    return base


def _part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = args[0]
    meta = _seen(torch.empty(own._place.shape, dtype=own._place.dtype, device="meta"), own._views)
    found = func(meta, *args[1:], **kwargs)
    if isinstance(found, Tensor):
        return AtRest(own._place, (*own._views, (func, args[1:], kwargs, None)))
    return type(found)(
        AtRest(own._place, (*own._views, (func, args[1:], kwargs, which))) for which in range(len(found))
    )


def _scales(own: Any, factor: Any) -> bool:
    """Whether a multiplication by a scalar could be noted for later."""
    if (
        not isinstance(own, AtRest)
        or own._views
        or isinstance(factor, AtRest)
        or not isinstance(factor, Tensor)
    ):
        return False
    return factor.ndim == 0 and own._place.scale(factor.detach())


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on lists for one element after the other, so that one tensor at a time is in memory."""
    count = len(args[0])

    def of(value: Any, index: int) -> Any:
        listed = isinstance(value, list | tuple) and len(value) == count
        return [value[index]] if listed else value

    found = [
        _compute(func, tuple(of(v, i) for v in args), {n: of(v, i) for n, v in kwargs.items()})
        for i in range(count)
    ]
    return [one[0] for one in found] if count and found[0] else None


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on copies, and write home what it has written."""
    bases: dict[object, Tensor] = {}
    reals: dict[int, Tensor] = {}
    originals: dict[int, AtRest] = {}

    def real(given: Any) -> Any:
        if not isinstance(given, AtRest):
            return given
        if id(given) not in reals:
            key = given._place.key
            if key not in bases:
                bases[key] = given._place.read()
            made = reals[id(given)] = _seen(bases[key], given._views)
            originals[id(made)] = given
        return reals[id(given)]

    ways, named = torch_private.map_leaves(real, args), torch_private.map_leaves(real, kwargs)
    written = {id(tensor): tensor for tensor in _written(schema_of(func), args, kwargs)}
    forms = {key: _geometry(reals[key]) for key in written}
    found = func(*ways, **named)
    for key in written:
        if _geometry(reals[key]) != forms[key]:
            raise ConfigError(
                f"{func}: a tensor of a wrapped model that rests at home cannot get another shape or storage; "
                "put the values in with copy_"
            )
    for place in {tensor._place.key: tensor._place for tensor in written.values()}.values():
        place.write(bases[place.key])
    return torch_private.map_leaves(lambda result: originals.get(id(result), result), found)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[AtRest]:
    """The tensors at rest that an operation writes."""
    given = {
        argument.name: args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return [leaf for leaf in torch_private.leaves_of(given) if isinstance(leaf, AtRest)]


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.data_ptr()
