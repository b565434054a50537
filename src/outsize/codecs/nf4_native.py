"""NF4 by the kernels in C, byte for byte as torch does it (see `nf4`)."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from outsize import native

_DTYPES = (torch.float32, torch.bfloat16)


def native_serves(elements: Tensor, codes: Tensor) -> bool:
    """Return whether the kernels can be called on these: elements, and bytes of their encoding."""
    on_host = elements.device.type == codes.device.type == "cpu"
    return on_host and elements.dtype in _DTYPES and native.available()


def native_encode(borders: Sequence[float], source: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write ``source`` [n] in codes, and the magnitudes of blocks; NaN where one is not finite.

    Args:
        borders: between levels, ascending.
        source: fp32 or bf16, on the host.
        codes: uint8, for whole blocks.
        scales: fp32 [blocks].
    """
    native.call(
        "nf4_encode",
        (ctypes.c_float * len(borders))(*borders),
        *_elements(source),
        ctypes.c_size_t(source.numel()),
        ctypes.c_void_p(codes.data_ptr()),
        ctypes.c_void_p(scales.data_ptr()),
        ctypes.c_int(torch.get_num_threads()),
    )


def native_decode(levels: Sequence[float], codes: Tensor, scales: Tensor, into: Tensor) -> None:
    """Fill ``into`` [n], fp32 or bf16 on the host, with the ``levels`` that codes name, times the scales of blocks."""
    native.call(
        "nf4_decode",
        (ctypes.c_float * len(levels))(*levels),
        ctypes.c_void_p(codes.data_ptr()),
        ctypes.c_void_p(scales.data_ptr()),
        ctypes.c_size_t(into.numel()),
        *_elements(into),
        ctypes.c_int(torch.get_num_threads()),
    )


def _elements(tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int]:
    return ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int(tensor.dtype is torch.bfloat16)
