"""Tensors in host memory as NumPy arrays, lent for the length of a call."""

import ctypes
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words: TypeAlias = NDArray[np.unsignedinteger[Any]]


def host_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous ``tensor`` in host memory, uint8 [nbytes]; use it while the tensor lives.

    `Tensor.numpy` would mark the storage as one that cannot be resized, which those of activations are.
    """
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


def host_words(tensor: Tensor, name: str) -> Words:
    """The elements of ``tensor`` as unsigned words, see `host_bytes`.

    Raises:
        ValueError: it does not lie in host memory, where codec ``name`` works.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"codec {name} works in host memory, not on {tensor.device}")
    kind = np.uint32 if tensor.dtype is torch.float32 else np.uint16
    words: Words = host_bytes(tensor).view(kind)
    return words
