"""What a codec is, and the figures measured for each.

What every codec does, and codecs by name. Tensors in host memory as NumPy arrays, lent for the length of a call.
What codecs make of given tensors: ratio beside its bound, rates of one core, error.
"""

import ctypes
import importlib
import importlib.util
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outsize import native
from outsize.codecs.codec_spec import SPECS, CodecSpec, codec_spec
from outsize.codecs.transport import DEVICE_PIECE_ELEMENTS
from outsize.errors import CodecError

# As torch calls devices of NVIDIA and AMD, and of Intel.
TRITON_KINDS = ("cuda", "xpu")
# By which a device's kernels are proved before they are used.
PROVED = ("nf4", "nf4-double", "int8", "int4", "lossless4", "lossless3")
DTYPE_NAME = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def pieces_on(device: torch.device, on_host: int) -> int:
    """Return the elements of a piece: so many on the host, where one stays in a cache, and more elsewhere."""
    return on_host if device.type == "cpu" else DEVICE_PIECE_ELEMENTS


@cache
def device_kernels(device: torch.device) -> Any:
    """Return `outsize.codecs.device_kernels` once they have given, on this machine, the bits of the host's forms.

    None where torch does their work. Triton needs a C compiler here; of a kind that has Triton and cannot use it, or
    gets other bits, it is said why.
    """
    if device.type not in TRITON_KINDS or importlib.util.find_spec("triton") is None or native.turned_off():
        return None
    try:
        kernels = importlib.import_module("outsize.codecs.device_kernels")
        wrong = [name for name in PROVED if not kernels.has_bits_of_host(open_codec(name), device)]
    except Exception as error:  # whatever Triton, its compiler or the driver raise
        warnings.warn(f"on {device} codecs run op by op, since Triton fails there: {error}", stacklevel=2)
        return None
    if wrong:
        warnings.warn(
            f"on {device} codecs run op by op, since kernels of {', '.join(wrong)} give other bits there than on the "
            "host; please report it with the versions of Triton and of the driver",
            stacklevel=2,
        )
    return None if wrong else kernels


class Codec(ABC):
    """Writes tensors in other bytes. It keeps nothing between calls, so any thread may use it.

    Attributes:
        spec: what it promises.
    """

    spec: CodecSpec
    _kernels: tuple[Any, ...] = ()

    def by(self, kernels: Any) -> Self:
        """Return the same codec by given kernels, or by torch's operations where they are None."""
        other = copy(self)
        other._kernels = (kernels,)
        return other

    def kernels_on(self, device: torch.device) -> Any:
        """Return the kernels that do its work on a device; None where torch does it."""
        return self._kernels[0] if self._kernels else device_kernels(device)

    def encode(self, source: Tensor, into: Tensor) -> int:
        """Write ``source`` into the first bytes of ``into`` and return how many.

        Args:
            source: contiguous, of any shape, in one of the codec's dtypes; it stays as it is.
            into: uint8 ``[spec.max_bytes(n)]`` or longer, contiguous, on the same device.

        Raises:
            ValueError: another dtype, a tensor that is not contiguous, or too little room; nothing is written.
        """
        dtype = self._check(source)
        most = self.spec.max_bytes(source.numel(), dtype)
        if into.dtype is not torch.uint8 or not into.is_contiguous() or into.numel() < most:
            raise ValueError(
                f"codec {self.spec.name} needs {most} contiguous bytes to encode {source.numel()} elements of "
                f"{dtype}, not {into.numel()} of {into.dtype}"
            )
        return self._encode(source.detach().view(-1), into.view(-1)) if source.numel() else 0

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Fill ``into`` with what ``encoded`` was made from.

        Args:
            encoded: uint8, exactly the bytes that `encode` wrote.
            into: contiguous, of the number of elements and the dtype of the source, on the same device.

        Raises:
            ValueError: another dtype, or a tensor that is not contiguous.
            CodecError: these bytes are not an encoding of so many elements.
        """
        dtype = self._check(into)
        most = self.spec.max_bytes(into.numel(), dtype)
        if encoded.dtype is not torch.uint8 or not encoded.is_contiguous():
            raise ValueError(f"codec {self.spec.name} decodes contiguous uint8, not {encoded.dtype}")
        wrong = encoded.numel() != most if self.spec.fixed_rate else encoded.numel() > most
        if wrong or bool(encoded.numel()) != bool(into.numel()):
            raise CodecError(
                f"{encoded.numel()} bytes are no {self.spec.name} encoding of {into.numel()} elements of {dtype}"
                f", which takes {'' if self.spec.fixed_rate else 'at most '}{most}"
            )
        if into.numel():
            self._decode(encoded.view(-1), into.detach().view(-1))

    def decode_pieces(self, room: Tensor, sizes: Sequence[int], into: Tensor, numel: int) -> None:
        """Fill ``into`` from encodings of ``numel`` elements each, the last of fewer.

        Args:
            room: uint8, of as many equal parts as there are encodings, each of which begins a part.
            sizes: bytes of each.
            into: as that of `decode`.
            numel: elements of each encoding but the last.

        Raises:
            ValueError, CodecError: as `decode`.
        """
        stride = room.numel() // len(sizes)
        for index, size in enumerate(sizes):
            start = index * stride
            self.decode(room[start : start + size], into[index * numel : (index + 1) * numel])

    def seeded(self, seed: int) -> "Codec":
        """Return the same codec with chances of its own, where it has any."""
        return self

    def _check(self, tensor: Tensor) -> str:
        dtype = DTYPE_NAME.get(tensor.dtype)
        if dtype not in self.spec.dtypes or dtype is None:
            raise ValueError(
                f"codec {self.spec.name} is for {', '.join(self.spec.dtypes)}, not {tensor.dtype}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"codec {self.spec.name} needs a contiguous tensor")
        return dtype

    @abstractmethod
    def _encode(self, source: Tensor, into: Tensor) -> int:
        """Encode ``source`` [n], n > 0, into uint8 with room for it; return the bytes written."""

    @abstractmethod
    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        """Decode into ``into`` [n], n > 0."""


class RawCodec(Codec):
    """Bytes as they lie in memory."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def _encode(self, source: Tensor, into: Tensor) -> int:
        into[: source.nbytes].copy_(source.view(torch.uint8))
        return source.nbytes

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        into.view(torch.uint8).copy_(encoded)


def open_codec(name: str) -> Codec:
    """Return the codec called ``name``, one of `outsize.codecs.codec_spec.SPECS`.

    Raises:
        ValueError: there is none of that name.
    """
    spec = codec_spec(name)
    module, _, kind = spec.opens.rpartition(".")
    codec: Codec = getattr(importlib.import_module(module), kind)(spec, **spec.options)
    return codec


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


# Of each kind no more than this is looked at: 64 MiB of bf16.
MOST_ELEMENTS = 2**25
REPEATS = 3
# What compressed tiers promise, as others have it: no codec of a run (docs/papers.md).
ZSTD_LEVEL, ZSTD_FRAME_BYTES = 3, 2**20
# Deltas are of two versions of a tensor, not of one.
NAMES = tuple(name for name in SPECS if name not in ("raw", "delta"))
# Words in the names of tensors, and what such tensors are; weights otherwise.
_KINDS = {
    "exp_avg": "moments",
    "moment": "moments",
    "grad": "gradients",
    "activation": "activations",
    "hidden_states": "activations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecFigures:
    """One codec on one kind of tensors.

    Attributes:
        kind: weights, gradients, moments or activations.
        codec: its name.
        dtype: of the elements.
        numel: elements.
        ratio: encoded bytes by raw bytes.
        bound: least ratio of any lossless code of single exponents.
        encode_bytes_per_s: of raw bytes, for a second of one core.
        decode_bytes_per_s: the same.
        largest_error: of an element, as a share of the largest magnitude; 0 where lossless.
        relative_error: 2-norm of the error by that of the elements.
    """

    kind: str
    codec: str
    dtype: str
    numel: int
    ratio: float
    bound: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    largest_error: float
    relative_error: float

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, ready for JSON."""
        return asdict(self)


def measure_file(
    path: Path, cast: torch.dtype | None = None, names: Sequence[str] = NAMES
) -> tuple[CodecFigures, ...]:
    """Measure codecs on the floating-point tensors of a safetensors file, by kind and dtype.

    Raises:
        CodecError: not a safetensors file, or nothing in it that codecs are for.
    """
    tensors_by_kind: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for name, tensor in _tensors(path):
        if tensor.dtype in DTYPE_NAME and tensor.numel():
            chosen = tensor.dtype if cast is None else cast
            of_kind = tensors_by_kind.setdefault((kind_of(name), chosen), [])
            room = MOST_ELEMENTS - sum(part.numel() for part in of_kind)
            if room > 0:  # a file may be larger than memory
                of_kind.append(tensor.reshape(-1)[:room].to(chosen, copy=True))
    if not tensors_by_kind:
        raise CodecError(f"{path}: no tensor of fp32, bf16 or fp16")
    return tuple(
        figures
        for (kind, _), tensors in sorted(tensors_by_kind.items(), key=lambda item: str(item[0]))
        for figures in measure(kind, torch.cat(tensors), names)
    )


def kind_of(name: str) -> str:
    """Return what a tensor called ``name`` is taken for."""
    return next((kind for word, kind in _KINDS.items() if word in name), "weights")


def measure(kind: str, source: Tensor, names: Iterable[str] = NAMES) -> tuple[CodecFigures, ...]:
    """Measure codecs on ``source`` [n]; those that are not for its dtype are left out."""
    dtype = DTYPE_NAME[source.dtype]
    bound = exponent_bound(source)
    measured = tuple(
        _measured(kind, open_codec(name), source, bound) for name in names if dtype in SPECS[name].dtypes
    )
    return (*measured, _by_zstd(kind, source, bound)) if names is NAMES else measured


def _by_zstd(kind: str, source: Tensor, bound: float) -> CodecFigures:
    """Return what zstd makes of the bytes as they are, frame by frame: no codec of a run, but what others promise."""
    import zstandard

    content = source.contiguous().view(torch.uint8).numpy().tobytes()
    compressor, decompressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()
    pieces = [content[start : start + ZSTD_FRAME_BYTES] for start in range(0, len(content), ZSTD_FRAME_BYTES)]
    frames = [compressor.compress(piece) for piece in pieces]
    encode_s = core_seconds(lambda: [compressor.compress(piece) for piece in pieces])
    decode_s = core_seconds(lambda: [decompressor.decompress(frame) for frame in frames])
    return CodecFigures(
        kind=kind,
        codec=f"zstd-{ZSTD_LEVEL}",
        dtype=DTYPE_NAME[source.dtype],
        numel=source.numel(),
        ratio=sum(map(len, frames)) / source.nbytes,
        bound=bound,
        encode_bytes_per_s=source.nbytes / encode_s,
        decode_bytes_per_s=source.nbytes / decode_s,
        largest_error=0.0,
        relative_error=0.0,
    )


def _measured(kind: str, codec: Codec, source: Tensor, bound: float) -> CodecFigures:
    dtype = DTYPE_NAME[source.dtype]
    room = torch.empty(codec.spec.max_bytes(source.numel(), dtype), dtype=torch.uint8)
    size = codec.encode(source, room)
    encoded, decoded = room[:size], torch.empty_like(source)
    encode_s = core_seconds(lambda: codec.encode(source, room))
    decode_s = core_seconds(lambda: codec.decode(encoded, decoded))
    finite = source.isfinite() & decoded.isfinite()
    exact = torch.where(finite, source, 0).float()
    error = torch.where(finite, decoded, 0).float() - exact
    return CodecFigures(
        kind=kind,
        codec=codec.spec.name,
        dtype=dtype,
        numel=source.numel(),
        ratio=size / source.nbytes,
        bound=bound,
        encode_bytes_per_s=source.nbytes / encode_s,
        decode_bytes_per_s=source.nbytes / decode_s,
        largest_error=float(error.abs().max() / exact.abs().max().clamp_min(1e-45)),
        relative_error=float(error.norm() / exact.norm().clamp_min(1e-45)),
    )


def exponent_bound(tensor: Tensor) -> float:
    """Return the least ratio of any code of single exponents: their entropy and the other bits, by all bits."""
    words = host_words(tensor.reshape(-1), "exponent_bound")
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


def core_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the least processor time of this thread that ``work`` took; what others do on the machine counts little.

    torch computes with one thread meanwhile.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work()
        seconds = []
        for _ in range(repeats):
            started = time.thread_time()
            work()
            seconds.append(time.thread_time() - started)
    finally:
        torch.set_num_threads(num_threads)
    return max(min(seconds), 1e-9)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CodecError(f"{path}: not a safetensors file that can be read: {error}") from error
