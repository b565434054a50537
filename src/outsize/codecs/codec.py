"""What every codec does, and codecs by name."""

import importlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from outsize.codecs.codec_spec import CodecSpec, codec_spec
from outsize.codecs.transport import DEVICE_PIECE_ELEMENTS
from outsize.errors import CodecError

DTYPE_NAME = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def pieces_on(device: torch.device, on_host: int) -> int:
    """Return the elements of a piece: so many on the host, where one stays in a cache, and more elsewhere."""
    return on_host if device.type == "cpu" else DEVICE_PIECE_ELEMENTS


class Codec(ABC):
    """Writes tensors in other bytes. It keeps nothing between calls, so any thread may use it.

    Attributes:
        spec: what it promises.
    """

    spec: CodecSpec

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
