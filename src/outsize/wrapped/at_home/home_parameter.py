"""A parameter whose bytes lie at home, in host memory: torch's own, but that whoever looks at it waits for the step.

An optimizer's step may be under way in other threads when code of the user looks at a parameter, its gradient or its
data. Every function of torch comes by here first and waits; what asks for the form alone does not. ``parameter.data``
counts changes as the parameter itself does, and ``parameter.data = value`` puts the value where the home has it.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import as_plain_tensors
from outsize.errors import ConfigError
from outsize.wrapped.at_home.at_rest import AtRest, value_to_assign

Wait = Callable[[nn.Parameter, bool], None]
Part = Callable[[nn.Parameter], None]
_WAIT, _PART = "_outsize_wait", "_outsize_part"
# Attributes with bytes behind them; all others tell the form.
_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})
_FORM = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device",
        "is_floating_point", "is_complex", "is_signed", "is_contiguous", "requires_grad_", "__hash__", "__len__",
        "register_hook", "register_post_accumulate_grad_hook",
    }
)  # fmt: skip


class HomeParameter(nn.Parameter):
    """What the class of a parameter at home has beside its own, see `show_at_home`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for the step under way where the function looks at bytes, then do it."""
        with plainly():
            name = func.__name__
            attribute = getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__") else ""
            if attribute == "grad":
                _wait_for((args[0],), gradient=name == "__get__")
            elif attribute in _VALUES or not (attribute or name in _FORM):
                _wait_for(torch_private.leaves_of((args, kwargs)), gradient=False)
                if attribute == "data":
                    if name == "__get__":
                        return args[0].detach()  # shares the count of changes
                    return _assign(args[0], args[1])
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        made = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = nn.Parameter(self.detach(), self.requires_grad)
        return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def plainly() -> AbstractContextManager[Any]:
    """Return a context in which parameters at home are as any others: nothing waits."""
    return as_plain_tensors()


def show_at_home(parameter: nn.Parameter, view: Tensor, wait: Wait, part: Part) -> nn.Parameter:
    """Have ``parameter`` show ``view``: the same object, but for one that has had no bytes.

    Args:
        parameter: any parameter, perhaps one that is at home already.
        view: bytes at home, of its shape.
        wait: called with the parameter, and whether its gradient is looked at, before anybody looks at either.
        part: called with the parameter before it is assigned other data.
    """
    with plainly():
        if isinstance(parameter, AtRest) or parameter.is_meta:
            former, parameter = parameter, nn.Parameter(view, requires_grad=parameter.requires_grad)
            vars(parameter).update(vars(former))
        else:
            parameter.data = view
        if not isinstance(parameter, HomeParameter):
            parameter.__class__ = _at_home(type(parameter))
        vars(parameter).update({_WAIT: wait, _PART: part})
    return parameter


def show_plainly(parameter: nn.Parameter, value: Tensor) -> None:
    """Undo `show_at_home`: ``parameter`` has ``value``."""
    with plainly():
        parameter.data = value
        for key in (_WAIT, _PART):
            vars(parameter).pop(key, None)
        parameter.__class__ = type(parameter).__mro__[2]


def resize(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter at home other sizes, as `resize_token_embeddings` does: it leaves home until the next forward.

    Raises:
        ConfigError: it has a gradient, which has room for the former sizes.
    """
    if parameter.grad is not None:
        raise ConfigError(
            f"parameter.data = a tensor of sizes {list(value.shape)} over {list(parameter.shape)}, whose gradient has "
            "those: optimizer.zero_grad() first"
        )
    show_plainly(parameter, value)


def _assign(parameter: nn.Parameter, value: Any) -> None:
    """Do what ``parameter.data = value`` means at home: the value goes there, and who holds what was keeps that."""
    if isinstance(value, Tensor) and value.dtype == parameter.dtype and value.shape != parameter.shape:
        return resize(parameter, value)
    value_home = value_to_assign(parameter.detach(), value)
    if value_home is not None:
        part: Part | None = vars(parameter).get(_PART)
        if part is not None:
            part(parameter)
        with torch.no_grad():
            parameter.detach().copy_(value_home)
    return None


@cache
def _at_home(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(kind.__name__, (HomeParameter, kind), {"__module__": kind.__module__})


def _wait_for(leaves: Any, *, gradient: bool) -> None:
    for leaf in leaves:
        if isinstance(leaf, HomeParameter):
            wait: Wait | None = vars(leaf).get(_WAIT)
            if wait is not None:
                wait(leaf, gradient)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return what calls a bound method as long as its object is there, and does not hold it."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        still = known()
        if still is not None:
            still(*args)

    return call
