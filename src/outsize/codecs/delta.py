"""Encode what an optimizer step changes of 16-bit weights, by Huffman codes.

At a fine-tuning rate a step moves a bf16 weight by a fraction of its last place, so that most weights stay and the
exclusive or of old and new is zero there. An encoding is a bit for each word, whether it changed, and the two bytes of
those that did, each of the three as `compress` writes bytes. The same serves wherever most words are zero.

What weights have to give is an uneven distribution of exponents, not repetition. A zstd that looks for matches spends
two thirds of its time to find false ones, which make the result longer: on the exponents of normal bf16 weights,
level 1 comes to 0.680 of the words' bytes at 0.6 GB/s, this to 0.663 at 1.6, and the bound is 0.659.
"""

from collections.abc import Sequence

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from outsize.codecs.codec import Codec, host_bytes, host_words
from outsize.codecs.codec_spec import CodecSpec
from outsize.errors import CodecError

Bytes = NDArray[np.uint8]

# No level, so no match finder to speak of: the smallest table and the longest least match that zstd accepts.
_PARAMETERS = {
    "strategy": zstandard.STRATEGY_FAST,
    "window_log": 18,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
}
# A table of codes of its own for each: 128 KiB, zstd's own block, costs nothing and follows what changes.
FRAME_BYTES = 2**20


def compress(pieces: Sequence[Bytes]) -> list[bytes]:
    """Return a frame for each piece."""
    parameters = zstandard.ZstdCompressionParameters(**_PARAMETERS)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return [compressor.compress(piece.data) for piece in pieces]


def decompress(frame: Bytes, into: Bytes) -> None:
    """Fill ``into`` from a frame.

    Raises:
        ValueError: the frame is damaged, or of another length.
    """
    try:
        decoded = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=into.size)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(decoded) != into.size:
        raise ValueError(f"a frame holds {len(decoded)} bytes, not {into.size}")
    into[:] = np.frombuffer(decoded, np.uint8)


def cut_frames(plane: Bytes) -> list[Bytes]:
    """Cut a plane into what goes into one frame each."""
    return [plane[start : start + FRAME_BYTES] for start in range(0, plane.size, FRAME_BYTES)]


def write_frames(frames: Sequence[bytes], into: Bytes) -> int:
    """Write frames, their lengths (32 bits each) before them; return the bytes written."""
    lengths = np.array([len(frame) for frame in frames], np.uint32)
    joined = lengths.tobytes() + b"".join(frames)
    into[: len(joined)] = np.frombuffer(joined, np.uint8)
    return len(joined)


def frame_bytes(frames: Sequence[bytes]) -> int:
    """Bytes that `write_frames` writes."""
    return sum(4 + len(frame) for frame in frames)


def read_frames(encoded: Bytes, pieces: Sequence[Bytes]) -> int:
    """Fill ``pieces`` from what `write_frames` wrote; return the bytes read.

    Raises:
        ValueError: it is damaged, or of other lengths.
    """
    at = 4 * len(pieces)
    if encoded.size < at:
        raise ValueError(f"{encoded.size} bytes are too few for {len(pieces)} frames")
    lengths = np.frombuffer(encoded[:at].tobytes(), np.uint32).tolist()
    for length, piece in zip(lengths, pieces, strict=True):
        if at + length > encoded.size:
            raise ValueError("a frame ends behind the last byte")
        decompress(encoded[at : at + length], piece)
        at += length
    return at


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
