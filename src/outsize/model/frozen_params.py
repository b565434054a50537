"""What lies apart from what trains: the frozen parameters of a unit that trains little, and those of another dtype.

A trained parameter costs weights, perhaps a master, two moments and a gradient, and all planes of a unit are as long.
So where most of a unit is frozen (adapters beside a frozen layer), what is frozen gets a plane of its own, of weights
alone.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from outsize.codecs.codec_spec import codec_spec
from outsize.errors import ModelError
from outsize.model.build import DTYPES
from outsize.model.sizes.model_spec import PartKind
from outsize.model.split import end_of, split

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
