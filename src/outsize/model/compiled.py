"""Blocks compiled by `torch.compile`: each kind of block once, whichever layer it is.

Parameters and buffers are inputs of what is compiled. So one compiled forward serves all layers of a kind, and a unit
whose weights lie in a slot, whose forward is run again, or whose saved tensors wait elsewhere, runs the very kernels of
a resident model with the same blocks: streamed and resident runs are equal bit for bit.

The story of one kind:

1. Its forward gets code of its own, under which torch's cache finds what was compiled; it goes with the model.
2. The first call of a form (shapes, dtypes, what needs gradients) compiles forward and backward, in one graph each. A
   form has kernels of its own (``dynamic=False``), which do not depend on the forms that came before it.
3. A block that is not one graph stays as it is, and so do those of its kind: what is compiled in pieces runs code
   between them that may take other ways with other numbers. The line at which the graph ends is told.
4. Without gradients (evaluation, generation) blocks run as they are, and where a mode watches operations one by one: it
   would see none of a compiled block.

Compiling blocks rather than models is what PyTorch calls regional compilation.
"""

import inspect
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from outsize.compat.torch_private import allow_forms, compile_errors, compile_graph, is_watched
from outsize.model.split import Split

# What compiles: torch's name of it.
BACKEND = "inductor"
# Forms of one kind. torch's own limit, 8, counts layers that differ in a number, rows, lengths and evaluation.
MOST_FORMS = 64


class CompiledKind:
    """The forward of one kind of block, called with a block and its arguments.

    Args:
        forward: a function of the block and its arguments.
        announce: told what was compiled, in how long, and why something was not.

    Attributes:
        forward: the same.
        reason: why it runs as it is; None where it runs compiled.
    """

    def __init__(self, forward: FunctionType, announce: Callable[[str], None]) -> None:
        self.forward = forward
        self.reason: str | None = None
        self._name = forward.__qualname__.partition(".")[0]
        self._announce = announce
        self._num_graphs = 0
        function = _with_own_code(forward)
        self._run = torch.compile(function, backend=self._compile, fullgraph=True, dynamic=False)

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what ``block`` makes of its arguments."""
        if self.reason is not None or not torch.is_grad_enabled() or is_watched():
            return self.forward(block, *args, **kwargs)
        allow_forms(MOST_FORMS)
        num_graphs, began_s = self._num_graphs, time.perf_counter()
        try:
            outputs = self._run(block, *args, **kwargs)
        except compile_errors() as error:
            self.reason = _reason(error)
            self._announce(f"compile: {self._name} runs as it is: {self.reason}")
            return self.forward(block, *args, **kwargs)
        if self._num_graphs > num_graphs:
            self._announce(f"compile: {self._name}, in {time.perf_counter() - began_s:.1f} s")
        return outputs

    def _compile(self, graph: Any, inputs: Any) -> Any:
        """Compile one graph, and its backward at once."""
        self._num_graphs += 1
        return compile_graph(BACKEND, graph, inputs)


def compile_blocks(split: Split, announce: Callable[[str], None]) -> None:
    """Have each block of ``split`` run compiled from its first call on; `take_eager` undoes it."""
    kinds: dict[Any, CompiledKind] = {}
    for module, unit in zip(split.modules, split.spec.units, strict=False):
        if unit.kind != "block":
            continue
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            announce(f"compile: {unit.name} runs as it is: its forward is not that of its class")
            continue
        if forward not in kinds:
            kinds[forward] = CompiledKind(forward, announce)
        module.forward = MethodType(kinds[forward], module)  # a method, so that a copy has its own


def take_eager(model: nn.Module) -> None:
    """Undo `compile_blocks`."""
    for module in model.modules():
        if _kind_of(vars(module).get("forward")) is not None:
            del module.forward


@contextmanager
def as_they_are(model: nn.Module) -> Iterator[None]:
    """Have compiled blocks of ``model`` run as they are for as long as the context lasts."""
    kinds = (_kind_of(vars(module).get("forward")) for module in model.modules())
    reasons = {kind: kind.reason for kind in kinds if kind is not None}
    for kind in reasons:
        kind.reason = "it is timed"
    try:
        yield
    finally:
        for kind, reason in reasons.items():
            kind.reason = reason


def is_compiled(forward: Callable[..., Any]) -> bool:
    """Whether a unit's own forward runs compiled, as far as is known by its calls."""
    kind = _kind_of(inspect.unwrap(forward))
    return kind is not None and kind.reason is None


def _kind_of(forward: object) -> CompiledKind | None:
    """Return the kind that ``forward``, of a module, runs; None where it is none of ours."""
    kind = getattr(forward, "__func__", None)
    return kind if isinstance(kind, CompiledKind) else None


def _with_own_code(forward: FunctionType) -> FunctionType:
    code, names = forward.__code__.replace(), forward.__globals__
    copy = FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _reason(error: BaseException) -> str:
    """Return what kept a block from being compiled, and at which line of it."""
    inner = getattr(error, "inner_exception", None) or error
    first_line = next((line.strip() for line in str(inner).splitlines() if line.strip()), "")
    stack: traceback.StackSummary | None = getattr(error, "real_stack", None)
    where = f", at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return f"{type(inner).__name__}: {first_line}{where}"
