"""Lossless and as short as exponents allow, for cold bytes: checkpoints, units at rest.

Each word is rotated left by one, so that the exponent fills its top byte (for fp16, five bits of it). That byte goes
through `huffman`; the others, sign and mantissa, look like noise and are kept. The encoding is the frames of the top
bytes, then the other bytes; or the words as they are, where that is not longer.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outsize.codecs import huffman
from outsize.codecs.codec import Codec
from outsize.codecs.codec_spec import CodecSpec
from outsize.codecs.host_arrays import host_bytes, host_words
from outsize.errors import CodecError


class PlanesCodec(Codec):
    """Exponents by Huffman coding, everything else as it is; on the host.

    Args:
        spec: see `outsize.codecs.codec_spec.ENTROPY`.
    """

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def _encode(self, source: Tensor, into: Tensor) -> int:
        words = host_words(source, self.spec.name)
        rotated = _rotate(words, 1).view(np.uint8).reshape(words.size, words.itemsize)
        frames = huffman.compress(huffman.cut(np.ascontiguousarray(rotated[:, -1])))
        others = rotated[:, :-1]
        room = host_bytes(into)
        if huffman.num_bytes(frames) + others.size >= source.nbytes:
            room[: source.nbytes] = words.view(np.uint8)
            return source.nbytes
        start = huffman.write_frames(frames, room)
        room[start : start + others.size].reshape(others.shape)[...] = others
        return start + others.size

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        words = host_words(into, self.spec.name)
        source = host_bytes(encoded)
        if source.size == words.nbytes:
            words.view(np.uint8)[:] = source
            return
        top = np.empty(words.size, np.uint8)
        rotated = np.empty((words.size, words.itemsize), np.uint8)
        try:
            start = huffman.read_frames(source, huffman.cut(top))
            rotated[:, :-1] = source[start:].reshape(words.size, words.itemsize - 1)
        except ValueError as error:
            raise CodecError(f"no {self.spec.name} encoding of {words.size} elements: {error}") from error
        rotated[:, -1] = top
        words[:] = _rotate(rotated.view(words.dtype)[:, 0], -1)


def exponent_bound(tensor: Tensor) -> float:
    """Return the least ratio of any code of single exponents: their entropy and the other bits, by all bits."""
    words = host_words(tensor.reshape(-1), "entropy")
    mantissa_bits, exponent_bits = {
        torch.float32: (23, 8),
        torch.bfloat16: (7, 8),
        torch.float16: (10, 5),
    }[tensor.dtype]
    exponents = (words >> mantissa_bits) & ((1 << exponent_bits) - 1)
    counts = np.bincount(exponents.astype(np.uint8), minlength=1 << exponent_bits)
    shares = counts[counts > 0] / max(words.size, 1)
    entropy = -float((shares * np.log2(shares)).sum())
    return (1 + mantissa_bits + entropy) / (8 * words.itemsize)


def _rotate(words: NDArray[np.unsignedinteger], by: int) -> NDArray[np.unsignedinteger]:
    bits = 8 * words.itemsize
    rotated: NDArray[np.unsignedinteger] = (words << (by % bits)) | (words >> (-by % bits))  # type: ignore[assignment]
    return rotated
