"""Compiled units and frozen parameters.

Blocks compiled by `torch.compile`: each kind of block once, whichever layer it is.

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

What lies apart from what trains: the frozen parameters of a unit that trains little, and those of another dtype.

A trained parameter costs weights, perhaps a master, two moments and a gradient, and all planes of a unit are as long.
So where most of a unit is frozen (adapters beside a frozen layer), what is frozen gets a plane of its own, of weights
alone.
"""

import inspect
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from outsize.codecs.codec_spec import codec_spec
from outsize.compat.torch_private import allow_forms, compile_errors, compile_graph, is_watched
from outsize.errors import ModelError
from outsize.model.build import DTYPES
from outsize.model.sizes.model_spec import PartKind
from outsize.model.split import Split, end_of, split

# What compiles: torch's name of it.
BACKEND = "inductor"
# The same graphs, cut in forward and backward alike, of torch's own operations: what is compiled for a GPU is measured
# on the CPU, and making kernels for that would take a minute and tell nothing of the GPU's.
WITHOUT_KERNELS = "aot_eager_decomp_partition"
# Forms of one kind. torch's own limit, 8, counts layers that differ in a number, rows, lengths and evaluation.
MOST_FORMS = 64


class CompiledKind:
    """The forward of one kind of block, called with a block and its arguments.

    Args:
        forward: a function of the block and its arguments.
        announce: told what was compiled, in how long, and why something was not.
        own_processor: whether what computes is a processor beside the host's, see `Devices.own_processor`.

    Attributes:
        forward: the same.
        reason: why it runs as it is; None where it runs compiled.
    """

    def __init__(
        self, forward: FunctionType, announce: Callable[[str], None], own_processor: bool = False
    ) -> None:
        self.forward = forward
        self.reason: str | None = None
        self._own_processor = own_processor
        self._name = forward.__qualname__.partition(".")[0]
        self._announce = announce
        self._num_graphs = 0
        function = _with_own_code(forward)
        # Inputs of blocks are no leaves, and torch.compile looks at their gradients where it compiles a further form.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
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
        """Compile one graph, and its backward at once; of a trial on another processor without kernels."""
        is_trial = self._own_processor and all(each.device.type == "cpu" for each in inputs)
        self._num_graphs += not is_trial
        return compile_graph(WITHOUT_KERNELS if is_trial else BACKEND, graph, inputs)


def compile_blocks(split: Split, announce: Callable[[str], None], own_processor: bool = False) -> None:
    """Have each block of ``split`` run compiled from its first call on; `take_eager` undoes it.

    Args:
        split: the model.
        announce: see `CompiledKind`.
        own_processor: whether what computes is a processor beside the host's, see `Devices.own_processor`.
    """
    kinds: dict[Any, CompiledKind] = {}
    for module, unit in zip(split.modules, split.spec.units, strict=False):
        if unit.kind != "block":
            continue
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            announce(f"compile: {unit.name} runs as it is: its forward is not that of its class")
            continue
        if forward not in kinds:
            kinds[forward] = CompiledKind(forward, announce, own_processor)
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


DTYPE_NAME = {dtype: name for name, dtype in DTYPES.items()}
Apart = Callable[[str], PartKind | None]


# Modules whose weights no product with tokens reads.
_TABLES = (
    *(nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def frozen_part(dtype: str, codec: str = "raw") -> PartKind:
    """The part of a unit that holds frozen weights of ``dtype``, written by a codec of fixed rate."""
    if codec == "raw":
        return PartKind(plane=f"frozen_{dtype}", dtype=dtype)
    spec = codec_spec(codec)
    return PartKind(
        plane=f"frozen_{dtype}_{codec}",
        dtype=dtype,
        codec=codec,
        encoded_bytes=lambda numel: spec.max_bytes(numel, dtype),
    )


def matrices_and_tables(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of what is worth a codec: matrices of linear layers and experts in blocks, and tables.

    Tables are the embedding and the head. Norms, biases, convolutions, adapters and what lies outside the blocks are
    small, or count for more than they weigh.
    """
    ends = [end_of(model, method) for method in ("get_input_embeddings", "get_output_embeddings")]
    adapters = _of_adapters(model)
    named = {name: p for name, p in model.named_parameters() if id(p) not in adapters}
    inside = {id(p) for module in ends if module is not None for p in module.parameters() if p.dim() == 2}
    plain = {
        id(p)
        for module in model.modules()
        if isinstance(module, _TABLES)
        for p in module.parameters(recurse=False)
    }
    blocks = [unit for unit in split(model).spec.units if unit.kind == "block"]
    in_blocks = {tensor.name for unit in blocks for tensor in unit.tensors if len(tensor.shape) > 1}
    tables = frozenset(name for name, p in named.items() if id(p) in inside)
    matrices = frozenset(name for name in in_blocks & named.keys() if id(named[name]) not in plain)
    return matrices - tables, tables


def _of_adapters(model: nn.Module) -> set[int]:
    """Return the parameters of adapters, by identity: what PEFT's layers have beside those they stand around."""
    ids: set[int] = set()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            ids.update({id(p) for p in module.parameters()} - {id(p) for p in base.parameters()})
    return ids


def dtype_and_parts(model: nn.Module, base_codec: str = "raw", table_codec: str = "raw") -> tuple[str, Apart]:
    """Return the dtype of what trains in ``model``, and in which frozen part the parameter of a name lies, if any.

    Apart lies what is frozen and has another dtype, or shares a unit with something trained that is smaller than
    what is frozen there, or is written by a codec. Where nothing trains the dtype is that of most parameters.

    Args:
        model: ``requires_grad`` says what trains.
        base_codec: how frozen matrices of its blocks are written, see `matrices_and_tables`.
        table_codec: how its embedding and head are.

    Raises:
        ModelError: what trains has several dtypes, or a parameter one that is not fp32, bf16 or fp16.
    """
    named = dict(model.named_parameters())
    unknown = {p.dtype for p in named.values()} - DTYPE_NAME.keys()
    trained = {p.dtype for p in named.values() if p.requires_grad}
    if unknown or len(trained) > 1:
        dtypes = ", ".join(sorted(map(str, unknown or trained)))
        whose = "some parameters" if unknown else "the parameters that train"
        raise ModelError(
            f"{whose} are {dtypes}; outsize needs fp32, bf16 or fp16, one of them for all that train: convert the "
            "model first, e.g. with model.to(torch.bfloat16), or freeze what need not train"
        )
    dtype = DTYPE_NAME[trained.pop() if trained else _most(named)]
    small = _beside_adapters(model, dtype)
    matrices, tables = matrices_and_tables(model)
    kinds = {}
    for name, p in named.items():
        codec = base_codec if name in matrices else table_codec if name in tables else "raw"
        if not p.requires_grad and (codec != "raw" or DTYPE_NAME[p.dtype] != dtype or name in small):
            kinds[name] = frozen_part(DTYPE_NAME[p.dtype], codec)
    return dtype, kinds.get


def _most(named: dict[str, nn.Parameter]) -> torch.dtype:
    counts: Counter[torch.dtype] = Counter()
    for parameter in named.values():
        counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0]


def _beside_adapters(model: nn.Module, dtype: str) -> set[str]:
    """Names of frozen parameters in units that train less than they keep."""
    names: set[str] = set()
    for unit in split(model, dtype).spec.units:
        frozen = [tensor for tensor in unit.tensors if not tensor.trainable]
        trained = sum(tensor.numel for tensor in unit.tensors if tensor.trainable)
        if 0 < trained < sum(tensor.numel for tensor in frozen):
            names.update(tensor.name for tensor in frozen)
    return names
