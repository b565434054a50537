"""Parameters that rest at home, and gradients that are handed out of it: whoever looks at them waits for the step.

An optimizer's step may be under way in other threads when code of the user looks at a parameter, its gradient or its
data. Every function of torch comes by here first and waits; what asks for the form alone does not. ``parameter.data``
counts changes as the parameter itself does, and ``parameter.data = value`` puts the value where the home has it.

What a program holds shows what lies at home. So a step under way is waited for as long as anything is held, and a
gradient that was let go of, and is still held, gets bytes of its own before the next one comes to where it lies.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import (
    as_plain_tensors,
    gradient_hooks,
    num_holders,
    storage_key,
    waits_for_others,
)
from outsize.errors import ConfigError
from outsize.wrapped.at_home.at_rest import AtRest, value_to_assign

Wait = Callable[[nn.Parameter, bool], None]
Assign = Callable[[nn.Parameter, Tensor], None]
_WAIT, _ASSIGN, _NOW = "_outsize_wait", "_outsize_assign", "_outsize_now"
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


def show_at_home(parameter: nn.Parameter, view: Tensor, wait: Wait, assign: Assign) -> nn.Parameter:
    """Have ``parameter`` show ``view``: the same object, but for one that has had no bytes.

    Args:
        parameter: any parameter, perhaps one that is at home already.
        view: bytes at home, of its shape.
        wait: called with the parameter, and whether its gradient is looked at, before anybody looks at either.
        assign: called with the parameter and other data of its form that it is assigned.
    """
    with plainly():
        if isinstance(parameter, AtRest) or parameter.is_meta:
            former, parameter = parameter, nn.Parameter(view, requires_grad=parameter.requires_grad)
            vars(parameter).update(vars(former))
        else:
            parameter.data = view
        if not isinstance(parameter, HomeParameter):
            parameter.__class__ = _at_home(type(parameter))
        vars(parameter).update({_WAIT: wait, _ASSIGN: assign})
    return parameter


def flat_values(name: str, parameter: nn.Parameter) -> Tensor:
    """Return what a parameter of that name has, flat.

    Raises:
        ConfigError: it is on meta.
    """
    if parameter.is_meta:
        raise ConfigError(
            f"{name} is on meta, a shape without values: give it values first (PEFT: low_cpu_mem_usage=False, or "
            "load the adapter), or open the model's checkpoint by outsize.load"
        )
    return parameter.detach().reshape(-1)


def show_plainly(parameter: nn.Parameter, value: Tensor) -> None:
    """Undo `show_at_home`: ``parameter`` has ``value``."""
    with plainly():
        parameter.data = value
        for key in (_WAIT, _ASSIGN):
            vars(parameter).pop(key, None)
        parameter.__class__ = type(parameter).__mro__[2]


@contextlib.contextmanager
def hooks_run(hooked: Mapping[str, nn.Parameter], assigned: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the hooks of parameters behind a backward, with the sum of that backward alone, as autograd does.

    What gradients were there before is set aside meanwhile.

    Args:
        hooked: the parameters, by name.
        assigned: gradients among theirs that the program has assigned; sums are made in them, and they stay.
    """
    with plainly():
        former: dict[str, Tensor | None] = {
            name: None if p.grad is None else p.grad.clone() for name, p in hooked.items()
        }
        former |= assigned
        for parameter in hooked.values():
            parameter.grad = None
    ended = False
    try:
        yield
        ended = True
    finally:
        try:
            for name, parameter in hooked.items():
                with plainly():
                    gradient, before = parameter.grad, former[name]
                    if not ended or gradient is None:
                        show_gradient(parameter, former.pop(name))
                        continue
                _run_hooks(parameter, gradient, before, is_assigned=name in assigned)
                del former[name]
        finally:
            with plainly():
                for name, before in former.items():  # a hook has failed: what was there is there again
                    show_gradient(hooked[name], before)


def _run_hooks(
    parameter: nn.Parameter, gradient: Tensor, former: Tensor | None, *, is_assigned: bool
) -> None:
    """Run the hooks of a parameter: on a new gradient, and behind the sum with a former one."""
    hooks, behind = gradient_hooks(parameter)
    if any(map(waits_for_others, hooks)):
        raise ConfigError(
            "register_multi_grad_hook waits for gradients as autograd has them, and those of a wrapped model come home "
            "by themselves: use register_post_accumulate_grad_hook, or look at parameter.grad behind the backward"
        )
    value = gradient.clone()
    for hook in hooks:
        changed = hook(value)
        value = value if changed is None else changed
    with torch.no_grad():
        total = value if former is None else former + value
        if is_assigned and former is not None:
            show_gradient(parameter, former.copy_(total))
        else:
            gradient.copy_(total)
    for hook in behind:
        hook(parameter)


def show_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Give a parameter a gradient, which may be of another dtype, or none."""
    with plainly():
        parameter.grad = None
        if gradient is not None:
            parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient


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


def stands_in(former: nn.Parameter, parameter: nn.Parameter) -> nn.Parameter:
    """Note that ``parameter``, which is returned, stands in the model for one that optimizers may know."""
    vars(former)[_NOW] = parameter
    return parameter


def parameter_of_now(parameter: Tensor) -> Tensor:
    """Return what stands in the model by now for a parameter that went to a home where it has no bytes."""
    while (following := vars(parameter).get(_NOW)) is not None:
        parameter = following
    return parameter


def _assign(parameter: nn.Parameter, value: Any) -> None:
    """Do what ``parameter.data = value`` means at home: the value goes there, and who holds what was keeps that."""
    if isinstance(value, Tensor) and value.dtype == parameter.dtype and value.shape != parameter.shape:
        return resize(parameter, value)
    if value_to_assign(parameter.detach(), value) is not None:
        assign: Assign | None = vars(parameter).get(_ASSIGN)
        if assign is None:
            parameter.data = value
        else:
            assign(parameter, value)
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


_log = logging.getLogger(__name__)


class HandedOut:
    """Weights and optimizer state in memory that were handed to a program, each as a storage of its own."""

    def __init__(self) -> None:
        self._storages: dict[str, tuple[torch.UntypedStorage, int]] = {}

    def tensor(self, key: str, view: Tensor, *, num_usual: int = 0) -> Tensor:
        """Return a tensor of the bytes of ``view``, in a storage that holds nothing else.

        Args:
            key: what it is called in messages; the same bytes are one storage.
            view: contiguous.
            num_usual: how many tensors of it there are with no program that holds one.
        """
        storage, _ = self._storages.get(key, (None, 0))
        if storage is not None and storage.data_ptr() == view.data_ptr():
            return torch.empty(0, dtype=view.dtype).set_(storage, 0, view.shape, view.stride())
        made = alone(view)
        self._storages[key] = made.untyped_storage(), num_usual
        return made

    def is_held(self) -> bool:
        """Whether a program holds any."""
        return any(num_holders(storage) > usual for storage, usual in self._storages.values())

    def part(self) -> None:
        """Give whoever holds some bytes apart from those at home, which are about to be given back.

        Raises:
            ConfigError: there is no room for them.
        """
        for key in self._storages:
            self.part_one(key)

    def part_one(self, key: str) -> bool:
        """Give whoever holds the bytes of ``key`` others, see `part`; returns whether anybody does."""
        storage, usual = self._storages.get(key, (None, 0))
        if storage is None or num_holders(storage) <= usual:
            return False
        try:
            storage.share_memory_()  # all of a storage moves at once
        except RuntimeError as error:
            raise ConfigError(
                f"{key}: the program holds a tensor of it (parameter.data, state_dict()), and shared memory has no "
                f"room for it ({error}), while its home is given back or assigned: keep tensor.clone(), or let go"
            ) from error
        return True


class HandedGradient:
    """A gradient in memory that was handed to a program.

    Args:
        tensor: what is handed out.
        view: its bytes at home.
    """

    def __init__(self, tensor: Tensor, view: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._storage = tensor.untyped_storage()
        self._view = view

    def part(self, name: str, factor: Tensor | None) -> None:
        """Give whoever still holds it bytes apart from those at home.

        Args:
            name: of the parameter.
            factor: what the gradient is yet to be multiplied by.
        """
        held = self._tensor()
        if held is None and not num_holders(self._storage):
            return
        with torch.no_grad():
            if factor is not None:
                self._view.mul_(factor)
            if held is not None and storage_key(held.untyped_storage()) == storage_key(self._storage):
                held.data = held.clone()
        if num_holders(self._storage):  # views of it
            try:
                self._storage.share_memory_()
            except RuntimeError as error:
                _log.warning(
                    "a view of the gradient of %s, which was let go of, shows the next one, since shared memory has no "
                    "room for it (%s): keep parameter.grad.clone()",
                    name,
                    error,
                )


def alone(view: Tensor) -> Tensor:
    """Return the same bytes in a storage that holds nothing else, as whoever saves tensors expects of parameters."""
    if not view.numel():
        return torch.empty_like(view)
    memory = torch.from_numpy(view.reshape(-1).view(torch.uint8).numpy()).untyped_storage()
    # No view, which could not be detached in place.
    return torch.empty(0, dtype=view.dtype).set_(memory, 0, view.shape, view.contiguous().stride())


class StateOwner(Protocol):
    """An optimizer's state, which rests in the home of a model."""

    def let_go(self) -> None:
        """Let go of what was put in as state and the program holds no longer."""
