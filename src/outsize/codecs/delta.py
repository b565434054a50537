"""What an optimizer step changes of 16-bit weights: few of them, and of those the last bits.

At a fine-tuning rate a step moves a bf16 weight by a fraction of its last place, so that most weights stay and the
exclusive or of old and new is zero there. An encoding is a bit for each word, whether it changed, and the two bytes of
those that did, each of the three as `compress` writes bytes. The same serves wherever most words are zero.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outsize.codecs.codec import Codec, host_bytes, host_words
from outsize.codecs.codec_spec import CodecSpec
from outsize.codecs.huffman import Bytes, compress, cut_frames, frame_bytes, read_frames, write_frames
from outsize.errors import CodecError


def difference(new: Tensor, old: Tensor) -> Tensor:
    """Return the bits in which ``new`` and ``old``, of one 16-bit dtype, differ, as that dtype; apply it to either."""
    return (new.view(torch.int16) ^ old.view(torch.int16)).view(new.dtype)


def apply_difference(changed: Tensor, weights: Tensor) -> None:
    """Turn ``weights`` in place into those that `difference` told from them."""
    weights.view(torch.int16).bitwise_xor_(changed.view(torch.int16))


class DeltaCodec(Codec):
    """Words that are mostly zero, see `difference`; on the host."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def _encode(self, source: Tensor, into: Tensor) -> int:
        words = host_words(source, self.spec.name)
        changed = words != 0
        values = words[changed]
        planes = [np.packbits(changed), _byte(values, 0), _byte(values, 1)]
        frames = compress([piece for plane in planes for piece in cut_frames(plane)])
        room = host_bytes(into)
        if 4 + frame_bytes(frames) >= source.nbytes:
            room[: source.nbytes] = words.view(np.uint8)
            return source.nbytes
        room[:4] = np.frombuffer(np.uint32(values.size).tobytes(), np.uint8)
        return 4 + write_frames(frames, room[4:])

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        words = host_words(into, self.spec.name)
        source = host_bytes(encoded)
        if source.size == words.nbytes:
            words.view(np.uint8)[:] = source
            return
        num_changed = int.from_bytes(source[:4].tobytes(), "little")
        if num_changed > words.size:
            raise CodecError(f"a delta of {words.size} words says that {num_changed} changed")
        bits = np.empty(-(-words.size // 8), np.uint8)
        values = np.empty((num_changed, 2), np.uint8)
        low, high = np.empty(num_changed, np.uint8), np.empty(num_changed, np.uint8)
        try:
            pieces = [piece for plane in (bits, low, high) for piece in cut_frames(plane)]
            if read_frames(source[4:], pieces) != source.size - 4:
                raise ValueError("there is more behind its last frame")
            changed = np.unpackbits(bits, count=words.size).view(bool)
            values[:, 0], values[:, 1] = low, high
            words[:] = 0
            words[changed] = values.view(np.uint16)[:, 0]
        except ValueError as error:
            raise CodecError(f"no {self.spec.name} encoding of {words.size} words: {error}") from error


def _byte(words: NDArray[np.unsignedinteger], which: int) -> Bytes:
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, 2)[:, which])
