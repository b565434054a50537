"""Liger's kernels in a model: norms, rotations and gated activations of its blocks, each in one kernel.

Liger puts them in by an interface of its own (`_apply_liger_kernel_to_instance`), which changes the instance, and the
module of transformers that its code lies in as well. Here the instance alone keeps them:

1. What the interface put into modules of transformers is taken out again. The functions among it, rotations, reach the
   instance by forwards of its own, in which their names mean them.
2. Triton computes on accelerators. Where tensors lie on none, as in the trial of a microbatch, the model's own code
   runs, and saves what the kernel would have saved, in as many tensors, so that what is measured is what a run takes.
3. Rotations write over what they are given: what a product returned, behind autograd's back. Where a mode watches
   operations, to keep what products return (`runtime.forward.saved_tensors`), they are given a copy.

Norms and activations write in a backward alone, over a gradient or what they saved themselves, which is used once.
Losses stay those of outsize.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from outsize.accelerators import Devices
from outsize.compat import torch_private
from outsize.compat.torch_private import is_watched, parameters_of
from outsize.compat.transformers_private import has_hub_kernels, put_kernels_in
from outsize.errors import ConfigError, ModelError

_PACKAGE = "liger_kernel"
# Forwards of Liger that are a product of an activation of one projection with another one.
_GATED = ("LigerSwiGLUMLP.forward", "LigerGEGLUMLP.forward", "LigerQwen3MoeSwiGLUMLP.forward")
# Its backward adds up what comes in any order: no two runs would be equal.
_EXPERTS = "LigerExperts.forward"
NORM = "LigerRMSNorm.forward"


def take_liger(model: nn.Module, devices: Devices) -> str:
    """Have ``model``, of transformers or PEFT's around one, compute with Liger's kernels; `take_plain` undoes it.

    Args:
        model: its parameters may lie anywhere.
        devices: that it will compute on.

    Returns:
        What computes now: which kernel, how many times.

    Raises:
        ConfigError: Liger is not installed, or Triton does not compute there.
        ModelError: Liger has no kernels for such a model, or the model has some already.
    """
    # What Triton's interpreter runs lies in host memory.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not devices.own_processor and not interpreted:
        raise ConfigError(
            f"kernels: those of Liger are Triton's, which computes on accelerators, not on {devices}; set none"
        )
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise ConfigError(
            f"kernels: liger needs the package liger-kernel ({error}): pip install 'outsize[liger]'"
        ) from error
    around: Any = model
    base = around.get_base_model() if hasattr(model, "get_base_model") else around
    kind = getattr(getattr(base, "config", None), "model_type", None)
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        model_types = ", ".join(sorted(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ModelError(
            f"kernels: Liger has none for a model of type {kind}, but for {model_types}; set none"
        )
    check_plain(base)
    put = _put(put_kernels_in, base)
    counts = Counter(name for part in base.modules() for name in _take(part, put, interpreted))
    return ", ".join(f"{name} × {count}" for name, count in sorted(counts.items()))


def save_as_liger(units: Iterable[nn.Module]) -> None:
    """Have norms and gated MLPs in ``units`` save what Liger's kernels save, to be counted; none of them is needed."""
    for module in (part for unit in units for part in unit.modules()):
        class_forward: Any = type(module).forward
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(partial(saving_norm, class_forward), module)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            module.forward = MethodType(_gated, module)


def check_plain(model: nn.Module) -> None:
    """Check that a model has no kernels of Liger or the hub but by outsize: they run on no CPU, where trials are.

    Raises:
        ModelError: it has.
    """
    if any(_is_patched(module) or has_hub_kernels(module) for module in model.modules()):
        raise ModelError(
            "kernels: Liger's or the hub's are in this model already, and could not be measured; leave out what put "
            "them there, and have outsize put Liger's in: model.kernels=liger of a run, kernels='liger' of a call"
        )


def take_plain(model: nn.Module) -> None:
    """Undo `take_liger`."""
    for module in model.modules():
        if isinstance(given_forward(module), Either):
            del module.forward


class Either:
    """In place of a module's forward: ``kernel`` on an accelerator, and ``own`` elsewhere, or ``kernel`` everywhere."""

    def __init__(self, kernel: Callable[..., Any], plain: Callable[..., Any], everywhere: bool) -> None:
        self._kernel, self._own, self._everywhere = kernel, plain, everywhere

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what ``module`` makes of its arguments."""
        run = self._kernel if self._everywhere or _is_away((args, kwargs)) else self._own
        return run(module, *args, **kwargs)


class _Saving(Function):
    """An operation that saves what a kernel in its place would save, and is run again in its backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], indices: range, rows: bool, *tensors: Tensor) -> Any:
        """Return the result of ``run`` on ``tensors``; its backward needs the values of those in ``indices`` alone.

        With ``rows``, a number for each row of the first one is saved as well.
        """
        ctx.run, ctx.kept = run, indices
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        numbers = [tensors[0].new_zeros(tensors[0].shape[:-1], dtype=torch.float32)] if rows else []
        ctx.save_for_backward(*(tensors[index] for index in indices), *numbers)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]
        tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms]
        for index, saved in zip(ctx.kept, ctx.saved_tensors, strict=False):
            tensors[index] = saved.detach()
        leaves = [tensor.requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            outputs = torch_private.leaves_of(ctx.run(*leaves))
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        roots, given = zip(*pairs, strict=True)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        in_order = iter(torch.autograd.grad(roots, wanted, given))
        return None, None, None, *(next(in_order) if need else None for need in needed)


# Function.apply has no types.
_saving: Callable[..., Any] = _Saving.apply


def saving_norm(plain: Callable[..., Tensor], module: nn.Module, hidden: Tensor) -> Tensor:
    """Run the norm ``plain`` of ``module``, which saves its input, its weight, and a number for each row."""
    weights = {name: weight for name, weight in parameters_of(module).items() if weight is not None}

    def run(hidden: Tensor, *given: Any) -> Tensor:
        parameters_of(module).update(zip(weights, given, strict=True))
        try:
            return plain(module, hidden)
        finally:
            parameters_of(module).update(weights)

    normed: Tensor = _saving(run, range(1 + len(weights)), True, hidden, *weights.values())
    return normed


def _gated(module: Any, hidden: Tensor) -> Any:
    """Run a gated MLP, which saves its two projections."""

    def run(gate: Tensor, up: Tensor) -> Any:
        opened = module.act_fn(gate)
        return opened * up if torch.is_grad_enabled() else opened.mul_(up)

    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    return module.down_proj(_saving(run, range(2), False, gate, up))


def _rotation(kernel: Callable[..., Any], plain: Callable[..., Any], everywhere: bool) -> Callable[..., Any]:
    """Return what rotates queries and keys by ``kernel``, or else by ``plain``, which saves cosines and sines."""

    def rotate(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if everywhere or _is_away(query):
            if is_watched():
                query, key = query.clone(), key.clone()
            return kernel(query, key, *args, **kwargs)
        if len(args) != 2:
            return plain(query, key, *args, **kwargs)
        return _saving(partial(plain, **kwargs), range(2, 4), False, query, key, *args)

    return rotate


def _is_away(values: Any) -> bool:
    """Whether the first tensor in ``values`` lies on an accelerator."""
    first = next(leaf for leaf in torch_private.leaves_of(values) if isinstance(leaf, Tensor))
    return first.device.type not in ("cpu", "meta")


def _is_ligers(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith(_PACKAGE)


def given_forward(module: nn.Module) -> Any:
    """Return the forward that ``module`` was given in place of its class's; None where it has that."""
    return getattr(vars(module).get("forward"), "__func__", None)


def _is_patched(module: nn.Module) -> bool:
    """Whether a module computes with kernels of Liger, by its class or by what its forward calls."""
    forward = given_forward(module) or type(module).forward
    called = getattr(getattr(forward, "__code__", None), "co_names", ())
    return _is_ligers(forward) or any(_is_ligers(forward.__globals__.get(name)) for name in called)


def _put(apply: Callable[..., None], model: nn.Module) -> dict[ModuleType, dict[str, Any]]:
    """Have Liger change ``model``; returns what it has put into modules, where it is no more."""
    before = {module: dict(vars(module)) for module in _modules()}
    try:
        apply(model, cross_entropy=False, fused_linear_cross_entropy=False)
    except Exception as error:  # of code that may be of another time than transformers'
        for module in model.modules():
            if _is_ligers(given_forward(module)):
                del module.forward
        raise ModelError(
            f"kernels: Liger fails at {type(model).__name__}: {type(error).__name__}: {error}; try another version of "
            "liger-kernel, or set none"
        ) from error
    finally:
        put = {module: _restored(module, values) for module, values in before.items()}
    return put


def _modules() -> list[ModuleType]:
    """Return the modules into which Liger puts something."""
    models = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    return [*models, nn, nn.functional]


def _restored(module: ModuleType, before: dict[str, Any]) -> dict[str, Any]:
    """Restore the former attributes of ``module`` and return the replaced ones."""
    put = {name: value for name, value in vars(module).items() if before.get(name, value) is not value}
    vars(module).update({name: before[name] for name in put})
    return put


def _take(module: nn.Module, put: dict[ModuleType, dict[str, Any]], everywhere: bool) -> Iterator[str]:
    """Have ``module`` run kernels: those that Liger has given it, and those ``put`` where its forward looks.

    Yields:
        Their names.
    """
    for name in ("extra_repr", "_get_name"):
        vars(module).pop(name, None)
    class_forward: Any = type(module).forward
    kernel = given_forward(module)
    if _is_ligers(kernel) and kernel.__qualname__ == _EXPERTS:
        del module.forward
    elif _is_ligers(kernel):
        saving = class_forward
        if kernel.__qualname__ in _GATED and hasattr(module, "act_fn"):
            saving = _gated
        elif kernel.__qualname__ == NORM:
            saving = partial(saving_norm, class_forward)
        module.forward = MethodType(Either(kernel, saving, everywhere), module)
        yield kernel.__qualname__.partition(".")[0]
        return
    names = next(
        (names_of_place for place, names_of_place in put.items() if class_forward.__globals__ is vars(place)),
        {},
    )
    called = {
        name: value
        for name, value in names.items()
        if isinstance(value, FunctionType) and name in class_forward.__code__.co_names
    }
    if called:
        namespace = class_forward.__globals__
        rotations = {name: _rotation(value, namespace[name], everywhere) for name, value in called.items()}
        forward = FunctionType(
            class_forward.__code__,
            {**namespace, **rotations},
            class_forward.__name__,
            class_forward.__defaults__,
            class_forward.__closure__,
        )
        forward.__kwdefaults__ = class_forward.__kwdefaults__
        module.forward = MethodType(Either(forward, class_forward, True), module)
        yield from (value.__name__ for value in called.values())
