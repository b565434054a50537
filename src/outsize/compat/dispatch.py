"""Contexts in which operations of torch are seen below autograd: its dispatch modes."""

from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, Self


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
    """Return whether a mode sees the operations of this thread.

    torch's public `is_in_torch_dispatch_mode` stays true where modes of two threads have overlapped.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode() is not None


def fake_tensors(*, allow_real: bool) -> Any:
    """Return a mode in which tensors have a form and no values; see `torch._subclasses.fake_tensor`.

    Args:
        allow_real: whether real tensors may be operands.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=allow_real)


def counting_changes_of_views() -> Any:
    """Return a context in which views made below autograd share the counter of changes of what they show."""
    import torch

    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)
