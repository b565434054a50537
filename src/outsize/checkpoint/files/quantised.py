"""Checkpoints whose matrices are quantised already, read as the weights that these stand for; for what does not train.

Each format is a layout of a few tensors beside each other. Here they become one tensor with a shape of its own, whose
elements are decoded as they are read; the rest of the reader knows nothing of it.

============  =======================================================================================================
bitsandbytes  ``w``: two codes to a byte, the first in the upper half, row by row; ``w.quant_map``: 16 levels;
4 bits        ``w.absmax``: a magnitude for each block of elements; where that is bytes itself, they are levels of
              ``w.nested_quant_map`` times ``w.nested_absmax``, one for each block of blocks, plus an offset;
              ``w.quant_state.bitsandbytes__nf4`` (or fp4): block sizes, shape and offset, JSON in bytes
GPTQ          ``p.qweight`` [in / n, out], ``p.qzeros`` [groups, out / n], ``p.scales`` [groups, out], ``p.g_idx``
              [in]: n integers to an int32, the first in the lowest bits; element (integer - zero) * scale of its
              group. A zero is stored less one, modulo 2^bits, but for files in the format gptq_v2
AWQ           ``p.qweight`` [in, out / 8], ``p.qzeros``, ``p.scales`` [groups, out]: eight integers to an int32, those
              of columns 0 2 4 6 1 3 5 7 from the lowest bits up; groups are consecutive rows
============  =======================================================================================================
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize import files
from outsize.checkpoint.files.checkpoint_format import StoredTensor, read_elements, read_tensor
from outsize.errors import CheckpointError, ModelError

Quantisation = Mapping[str, Any]
"""What ``config.json`` says under ``quantization_config``."""

_STATE = ".quant_state.bitsandbytes__"
_PACKED = ".qweight"
_SCALED = ".act.scales"
_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_GPTQ_BITS = (2, 4, 8)
# Codes are decoded in pieces of so many elements.
_PIECE_ELEMENTS = 2**20
KEY = "quantization_config"


def quantisation_of(config: Any) -> Quantisation | None:
    """Return what the config of a model, or of a part of it, says of weights; None where they are as they are."""
    fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    parts = (part for part in (fields, *fields.values()) if isinstance(part, Mapping))
    settings = next((part[KEY] for part in parts if part.get(KEY) is not None), None)
    if settings is None:
        return None
    method = {"quant_method": "bitsandbytes"} if any(map(settings.get, _BITSANDBYTES)) else {}
    return {**settings, **method}


def require_readable(quantisation: Quantisation, *, trains: bool) -> None:
    """Check that a quantised model can be had.

    Args:
        quantisation: what its config says.
        trains: whether its own weights are to train.

    Raises:
        ModelError: it cannot; says which format it is and what to do.
    """
    name = _name(quantisation)
    if not _is_known(quantisation):
        raise ModelError(
            f"the weights of this model are stored as {name}, which outsize does not read (bitsandbytes in 4 bits, "
            "GPTQ and AWQ are read): use the checkpoint that it was made from, or have transformers write one, "
            "AutoModelForCausalLM.from_pretrained(PATH).dequantize().save_pretrained(OTHER)"
        )
    if trains:
        raise ModelError(
            f"the model is quantised ({name}), and quantised weights cannot be trained: train adapters beside them "
            "(--method lora), load them frozen (outsize.load(..., trainable=False)), or use the checkpoint that they "
            "were made from"
        )


def stored_as(config: Mapping[str, Any]) -> str | None:
    """Return in what format a ``config.json`` or a part of it says that weights are stored, and what that allows."""
    settings = quantisation_of(config)
    if settings is None:
        return None
    allows = "which trains adapters alone" if _is_known(settings) else "which outsize does not read"
    return f"{_name(settings)}, {allows}"


def decoded(stored: Mapping[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    """Return ``stored`` with every quantised matrix in one, by the name of its parameter; otherwise as it is.

    Raises:
        CheckpointError: parts are missing or do not belong together, or config.json says another thing of them.
    """
    tensors = dict(stored)
    states = [name for name in stored if _STATE in name]
    packed = [name for name in stored if name.endswith(_PACKED)]
    quantisation = _read_quantisation(directory)
    method = quantisation.get("quant_method")
    there = {"bitsandbytes": states, "gptq": packed, "awq": packed}
    if (quantisation or states or packed) and not there.get(str(method)):
        layout = "of bitsandbytes" if states else "of GPTQ or AWQ" if packed else "plain"
        setting = f"{KEY} {_name(quantisation)}" if quantisation else f"no {KEY}"
        raise CheckpointError(
            f"config.json of {directory} has {setting}, and the weights are {layout}: they do not belong together; "
            f"download them again, or take {KEY} out of config.json where weights are plain"
        )
    for name in states:
        _take_bitsandbytes(tensors, name)
    if packed:
        scaled = next((name for name in stored if name.endswith(_SCALED)), None)
        if scaled is not None:
            raise CheckpointError(
                f"{stored[scaled].path}: {scaled}: AWQ has moved scales into an activation, which the model of "
                "transformers does not have; use the checkpoint that it was made from"
            )
        take = _take_awq if method == "awq" else _take_gptq
        for name in packed:
            take(tensors, name.removesuffix(_PACKED), quantisation)
    return tensors


def _name(quantisation: Quantisation) -> str:
    method = str(quantisation.get("quant_method", "a format without a name"))
    if method == "bitsandbytes":
        return f"bitsandbytes, {4 if quantisation.get('load_in_4bit') else 8} bits"
    bits = quantisation.get("bits", quantisation.get("w_bit"))
    layout = [] if _layout(quantisation) in (None, method) else [str(_layout(quantisation))]
    return ", ".join([method, *([] if bits is None else [f"{bits} bits"]), *layout])


def _layout(quantisation: Quantisation) -> str | None:
    """Return the layout of a GPTQ or AWQ checkpoint, under the names that transformers knows for it."""
    older = "version" if quantisation.get("quant_method") == "awq" else "checkpoint_format"
    values = (
        "llm-awq" if quantisation.get("backend") == "llm-awq" else None,
        *map(quantisation.get, (older, "format")),
    )
    return next((str(one).lower() for one in values if one is not None), None)


def _is_known(quantisation: Quantisation) -> bool:
    method, bits = quantisation.get("quant_method"), quantisation.get("bits", quantisation.get("w_bit", 4))
    if method == "bitsandbytes":
        return bool(quantisation.get("load_in_4bit"))
    layout = _layout(quantisation)
    if method == "awq":
        return bits == 4 and layout in (None, "gemm")
    return method == "gptq" and bits in _GPTQ_BITS and layout in (None, "gptq", "gptq_v2")


def _read_quantisation(directory: Path) -> Quantisation:
    """Return what ``config.json`` says; nothing where there is none."""
    path = directory / "config.json"
    fields = files.read_json(path, CheckpointError, "download it again") if path.exists() else {}
    return quantisation_of(fields) or {}


def _part(tensors: dict[str, StoredTensor], name: str) -> StoredTensor:
    """Take one of the tensors that a matrix is made of."""
    try:
        return tensors.pop(name)
    except KeyError:
        raise CheckpointError(
            f"{name} is missing beside the tensors that belong to it; download it again"
        ) from None


def _take_bitsandbytes(tensors: dict[str, StoredTensor], state_name: str) -> None:
    name = state_name.partition(_STATE)[0]
    state_tensor = _part(tensors, state_name)
    try:
        state = json.loads(bytes(read_tensor(state_tensor).tolist()))
        shape = tuple(int(size) for size in state["shape"])
        block, nested = int(state["blocksize"]), int(state.get("nested_blocksize") or 0)
        offset = float(state.get("nested_offset") or 0.0)
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[
            state["dtype"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{state_tensor.path}: {state_name} is not what bitsandbytes writes: {error}"
        ) from error
    codes, absmax, levels = (_part(tensors, name + end) for end in ("", ".absmax", ".quant_map"))
    # The codes are bytes whatever dtype they are stored as (bnb_4bit_quant_storage).
    codes = replace(codes, dtype=torch.uint8, shape=(codes.numel * codes.dtype.itemsize,))
    is_nested = absmax.dtype is torch.uint8
    outer = (
        [_part(tensors, name + end) for end in (".nested_absmax", ".nested_quant_map")] if is_nested else []
    )
    numel = torch.Size(shape).numel()
    if 2 * codes.numel < numel or absmax.numel * block < numel or levels.numel != 16:
        raise CheckpointError(f"{codes.path}: the parts of {name} do not make {shape}; download it again")

    def magnitudes(first: int, last: int) -> Tensor:
        if not is_nested:
            return _read(absmax, first, last, torch.float32)
        inner = read_tensor(outer[1]).float()[_read(absmax, first, last, torch.uint8).int()]
        scales = _read(outer[0], first // nested, (last - 1) // nested + 1, torch.float32)
        which = torch.arange(first, last) // nested - first // nested
        return inner.mul_(scales[which]).add_(offset)

    def decode(start: int, stop: int, into: Tensor) -> None:
        table = read_tensor(levels).float()
        for first in range(start, stop, _PIECE_ELEMENTS):
            last = min(first + _PIECE_ELEMENTS, stop)
            pairs = _read(codes, first // 2, (last + 1) // 2, torch.uint8)
            both = torch.stack([pairs >> 4, pairs & 15], dim=1).view(-1)
            values = table[both[first % 2 : first % 2 + last - first].int()]
            of = torch.arange(first, last) // block
            values.mul_(magnitudes(first // block, (last - 1) // block + 1)[of - first // block])
            into[first - start : last - start].copy_(values)

    tensors[name] = replace(codes, name=name, dtype=dtype, shape=shape, decode=decode)


def _take_gptq(tensors: dict[str, StoredTensor], prefix: str, quantisation: Quantisation) -> None:
    packed, zeros, scales = (_part(tensors, prefix + end) for end in (_PACKED, ".qzeros", ".scales"))
    groups = tensors.pop(prefix + ".g_idx", None)
    bits = int(quantisation.get("bits", 4))
    more = 0 if _layout(quantisation) == "gptq_v2" else 1
    rows, columns = packed.shape[0] * (32 // bits), packed.shape[1]
    _check_groups(prefix, packed, scales, zeros.numel * (32 // bits), columns)

    def matrix() -> Tensor:
        integers = _unpacked(read_tensor(packed).T, bits).T  # [in, out]
        # A zero point of 0 is stored as all ones.
        zero = _unpacked(read_tensor(zeros), bits) + more & (1 << bits) - 1
        of = read_tensor(groups).long() if groups is not None else _consecutive(rows, scales.shape[0])
        return ((integers - zero[of]).float() * read_tensor(scales).float()[of]).T

    _put_matrix(tensors, prefix, packed, scales.dtype, (columns, rows), matrix)


def _take_awq(tensors: dict[str, StoredTensor], prefix: str, _: Quantisation) -> None:
    packed, zeros, scales = (_part(tensors, prefix + end) for end in (_PACKED, ".qzeros", ".scales"))
    rows, columns = packed.shape[0], packed.shape[1] * 8
    _check_groups(prefix, packed, scales, zeros.numel * 8, columns)
    order = torch.tensor([_AWQ_COLUMNS.index(column) for column in range(8)])

    def unpacked(tensor: StoredTensor) -> Tensor:
        integers = _unpacked(read_tensor(tensor), 4)
        return integers.view(len(integers), -1, 8)[:, :, order].flatten(1)

    def matrix() -> Tensor:
        of = _consecutive(rows, scales.shape[0])
        return ((unpacked(packed) - unpacked(zeros)[of]).float() * read_tensor(scales).float()[of]).T

    _put_matrix(tensors, prefix, packed, scales.dtype, (columns, rows), matrix)


def _check_groups(
    prefix: str, packed: StoredTensor, scales: StoredTensor, num_zeros: int, columns: int
) -> None:
    if len(scales.shape) != 2 or scales.shape[1] != columns or num_zeros != scales.numel:
        raise CheckpointError(
            f"{packed.path}: the parts of {prefix} do not belong together: {scales.numel} scales and {num_zeros} zeros "
            f"for {columns} columns; download it again"
        )


def _put_matrix(
    tensors: dict[str, StoredTensor],
    prefix: str,
    packed: StoredTensor,
    dtype: torch.dtype,
    shape: tuple[int, int],
    matrix: Callable[[], Tensor],
) -> None:
    """Enter a matrix that can be had as a whole only; what was made last is kept while its stretches are read."""
    last: list[Tensor] = []

    def decode(start: int, stop: int, into: Tensor) -> None:
        if start == 0:
            last.clear()
        if not last:
            last.append(matrix().contiguous().view(-1))
        into.copy_(last[0][start:stop])
        if stop == len(last[0]):
            last.clear()

    name = prefix + ".weight"
    tensors[name] = replace(packed, name=name, dtype=dtype, shape=shape, decode=decode)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers of ``words``, int32 [rows, n]: those of a word beside each other, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.contiguous()[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)


def _consecutive(rows: int, num_groups: int) -> Tensor:
    return torch.arange(rows) // (rows // num_groups)


def _read(stored: StoredTensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    values = torch.empty(last - first, dtype=dtype)
    read_elements(stored, first, last, values)
    return values
