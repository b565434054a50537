"""Private names of torch: one function each, so that a release which moves one breaks a feature alone.

A leaf is what is no container: containers are lists, tuples, dictionaries and the classes registered with torch, such
as transformers' outputs. None is a leaf.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn


def compile_graph(backend: str, graph: Any, inputs: Any) -> Any:
    """Compile ``graph``, and its backward at once, not when one first runs; called back by `torch.compile`."""
    # torch's cache takes code made for other vectors than torch's own of today, and that is wrong: NaN was seen.
    tag = torch.compiler.config.cache_key_tag + torch.backends.cpu.get_cpu_capability()
    import torch._inductor.config as inductor

    repeats = {"deterministic": torch.are_deterministic_algorithms_enabled()}  # of each thread, by itself
    with (
        inductor.patch(repeats if hasattr(inductor, "deterministic") else {}),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
    ):
        return torch._dynamo.lookup_backend(backend)(graph, inputs)


def allow_forms(most: int) -> None:
    """Have `torch.compile` compile a function for ``most`` forms of its arguments at least, in this thread."""
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, most)


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what is raised by code that cannot be compiled."""
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit


class OperationMode:
    """While active, every operation of this thread goes through `handle`; a mode may be entered again within itself."""

    def __init__(self) -> None:
        self._entered: list[Any] = []

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the operation ``func``, which runs below this mode if it is called here."""
        return func(*args, **kwargs)

    def __enter__(self) -> Self:
        mode = watching(self.handle)
        mode.__enter__()
        self._entered.append(mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)


def watching(handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Return a context in which every operation goes through ``handle``, called with it and its arguments."""
    return _mode_class()(handle)


@cache
def _mode_class() -> Callable[[Callable[..., Any]], Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Through(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, handle: Callable[..., Any]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._handle = handle

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._handle(func, args, kwargs or {})

    return Through


def is_watched() -> bool:
    """Return whether a mode sees this thread's operations; `is_in_torch_dispatch_mode` confuses those of threads."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode() is not None


def has_saving_hooks() -> bool:
    """Return whether hooks take what autograd saves in this thread: `torch.autograd.graph.saved_tensors_hooks`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def transforming() -> str:
    """Return what makes other values of this thread's operations, or derivatives beside them; empty for nothing."""
    from torch.utils._device import DeviceContext

    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, jvp, grad)"
    if torch.autograd.forward_ad._current_level >= 0:
        return "a forward-mode derivative (torch.autograd.forward_ad)"
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [type(mode) for mode in stack if not isinstance(mode, DeviceContext)]
    return f"a TorchFunctionMode ({modes[-1].__name__})" if modes else ""


def attention_kernels() -> AbstractContextManager[None]:
    """Return a context in which attention chooses among the kernels of now."""
    from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel

    return sdpa_kernel(_cur_sdpa_kernel_backends(with_priority=True), set_priority=True)


def fake_tensors(*, allow_real: bool) -> Any:
    """Return a mode in which tensors have a form and no values; with ``allow_real`` real ones may be operands."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=allow_real)


def without_fake_tensors() -> Any:
    """Return a context in which the mode of `fake_tensors` does not see operations."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def counting_changes_of_views() -> Any:
    """Return a context in which views made below autograd share the counter of changes of what they show."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def version_of(tensor: Tensor) -> int:
    """Return how often the memory of ``tensor`` was changed in place, as autograd counts it."""
    return tensor._version


def made_at(node: Any) -> int:
    """Return how many nodes of graphs its thread had made before ``node``."""
    return int(node._sequence_nr())


def keeps_alive(node: Any) -> bool:
    """Return whether the Python object of ``node`` keeps it alive: of a Python function none did in torch 2.11."""
    return not isinstance(node, torch._C._FunctionBase)


def num_nodes() -> int:
    """Return how many nodes of graphs this thread has made."""
    return int(torch._C._autograd._get_sequence_nr())


def will_run(node: Any) -> bool:
    """Return whether the backward under way comes to ``node``."""
    return bool(torch._C._will_engine_execute_node(node))


def keeping_versions(tensors: Any) -> Any:
    """Return a context in which changes in place of ``tensors`` are not counted."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tensors)


def operations(*names: str) -> frozenset[Any]:
    """Return the operations called ``names``, such as ``mm.default``; those that this torch has not are left out."""
    overloads = set()
    for name in names:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        overloads |= {operation} - {None}
    return frozenset(overloads)


def schema_of(operation: Any) -> Any:
    """Return the schema of ``operation``: its arguments, and which of them it writes to or returns."""
    return operation._schema


def is_grouped_product(func: Any) -> bool:
    """Return whether an operation multiplies tokens by the experts that they visit."""
    return func is torch.ops.aten._grouped_mm.default


def fused_adamw(
    weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: int, **settings: Any
) -> None:
    """Step ``weights`` and their moments for the ``count``-th time, as `torch.optim.AdamW` does with ``fused=True``."""
    torch._fused_adamw_(
        [weights], [gradient], [exp_avg], [exp_avg_sq], [], [weights.new_full((), count, dtype=torch.float32)],
        amsgrad=False, maximize=False, **settings,
    )  # fmt: skip


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of ``tensors``, by the kernel of `torch.nn.utils.clip_grad_norm_`."""
    return torch.stack(torch._foreach_norm(tensors, 2.0))


@contextmanager
def muon_products(instead: Callable[..., Tensor]) -> Iterator[Callable[..., Tensor]]:
    """Have `torch.optim.Muon` orthogonalize by ``instead`` while the context lasts; yields its own way of it."""
    from torch.optim import _muon

    torch_function = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = instead
    try:
        yield torch_function
    finally:
        _muon._zeropower_via_newtonschulz = torch_function


T = TypeVar("T")


def allocations(work: Callable[[], T]) -> tuple[T, list[int]]:
    """Return what ``work`` returns, and the bytes of each allocation on the CPU in it; of a release, negative."""
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    settings = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(settings)  # the present one, Kineto, says on standard error that it runs
    try:
        result = work()
    finally:
        events = [event for thread in _disable_profiler_legacy() for event in thread]
    return result, [num_bytes for event in events if (num_bytes := event.cpu_memory_usage())]


def of_all_threads() -> Any:
    """Return the setting of `torch.profiler.profile` that has it see threads which stand already."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def num_holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors lie in ``storage``: views count one by one, and so do arrays of numpy over it."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that ``storage`` has to itself as long as it lives."""
    return int(storage._cdata)


def memory_key(tensor: Tensor) -> int:
    """Return the `storage_key` of what ``tensor`` lies in: that of all its views."""
    return int(tensor.untyped_storage()._cdata)


def has_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` lies in a storage of its own kind: not sparse, and none of vmap's."""
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def has_no_bytes(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a class that wraps others, or rests elsewhere: its address is that of nothing."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def weak_storage(storage: torch.UntypedStorage) -> object:
    """Return what keeps no byte of ``storage``, and keeps its `storage_key` from being that of another one."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def no_function_override() -> Any:
    """Return the ``__torch_function__`` of a subclass whose operations go straight to its ``__torch_dispatch__``."""
    return torch._C._disabled_torch_function_impl


def formed_like(kind: type[Tensor], form: Tensor, device: torch.device) -> Any:
    """Return a tensor of class ``kind`` that has no bytes, and shape, strides and dtype of ``form``."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        form.shape,
        strides=form.stride(),
        storage_offset=form.storage_offset(),
        dtype=form.dtype,
        device=device,
    )


def as_plain_tensors() -> AbstractContextManager[Any]:
    """Return a context in which subclasses of tensors are treated as tensors: no ``__torch_function__`` is called."""
    return cast(AbstractContextManager[Any], torch._C.DisableTorchFunctionSubclass())


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of ``module`` itself by name: what is put there is its parameter, without any check."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of ``module`` itself by name; see `parameters_of`."""
    return module._buffers


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the forward hooks and the forward pre-hooks of ``module``."""
    return module._forward_hooks, module._forward_pre_hooks


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return all hooks of the forward and the backward of ``module``."""
    return *forward_hooks_of(module), module._backward_hooks, module._backward_pre_hooks


def has_hooks_of_all() -> bool:
    """Return whether hooks run around the forward of every module."""
    from torch.nn.modules import module

    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def replace_forward_hooks(module: nn.Module, hooks: Any) -> Any:
    """Replace the forward hooks of ``module`` by ``hooks``; returns the former."""
    previous, module._forward_hooks = module._forward_hooks, hooks
    return previous


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return whether hooks run on a gradient of ``parameter``, before it is added or behind."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def wants_gradient(tensor: Tensor) -> bool:
    """Return whether a program waits for the gradient of a result: it retains it, or has a hook on it."""
    return bool(tensor.retains_grad or tensor._backward_hooks)


def gradient_hooks(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """Return the hooks of ``parameter``: on gradients, and behind their accumulation."""
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return tuple(list((hooks or {}).values()) for hooks in both)  # type: ignore[return-value]


def share_gradient_hooks(parameter: nn.Parameter, other: Tensor) -> None:
    """Give ``other`` the hooks on gradients of ``parameter``, removed by the same handles."""
    if parameter._backward_hooks:
        other._backward_hooks = parameter._backward_hooks
    if parameter._post_accumulate_grad_hooks:
        other._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def place_to_move_to(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return device and dtype that arguments of `torch.nn.Module.to` ask for; None where they ask for none."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called: calls of it go to what was compiled."""
    return module._compiled_call_impl is not None


def waits_for_others(hook: Any) -> bool:
    """Return whether a hook on a gradient waits for those of other tensors, by `register_multi_grad_hook`."""
    return str(getattr(hook, "__qualname__", "")).startswith("register_multi_grad_hook.")


IsLeaf = Callable[[Any], bool]


def flatten(values: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """Return the leaves of ``values`` in order, and the structure that they were in; see `unflatten`."""
    return torch.utils._pytree.tree_flatten(values, is_leaf=is_leaf)


def unflatten(leaves: Any, structure: Any) -> Any:
    """Return ``leaves`` in the structure that `flatten` returned."""
    return torch.utils._pytree.tree_unflatten(leaves, structure)


def leaves_of(values: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Return the leaves of ``values`` in order."""
    return torch.utils._pytree.tree_leaves(values, is_leaf=is_leaf)


def is_leaf(value: Any) -> bool:
    """Return whether ``value`` is no container."""
    return torch.utils._pytree.tree_is_leaf(value)


def map_leaves(change: Callable[[Any], Any], values: Any) -> Any:
    """Return ``values`` with what ``change`` makes of each leaf in its place."""
    return torch.utils._pytree.tree_map(change, values)


def map_only(kind: type[Any], change: Callable[[Any], Any], values: Any) -> Any:
    """Return ``values`` with what ``change`` makes of each leaf of ``kind`` in its place."""
    return torch.utils._pytree.tree_map_only(kind, change, values)
