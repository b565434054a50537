"""What leaves a device of an activation: the bytes of a storage, or where it is shorter an encoding of its elements."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.codecs.codec import DTYPE_NAME, Codec


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A storage that is away.

    Attributes:
        num_bytes: of the storage.
        sent_bytes: of what was sent for it.
        dtype: of its elements, where that is an encoding; None where it is the bytes themselves.
    """

    num_bytes: int
    sent_bytes: int
    dtype: torch.dtype | None = None


def pack(codec: Codec | None, content: Tensor, dtype: torch.dtype) -> tuple[Tensor, EncodedTensor]:
    """Return what is sent for the bytes of a storage, uint8, and how to read it.

    Args:
        codec: writes elements that are floating point; None none.
        content: uint8 [num_bytes].
        dtype: of the elements in it.
    """
    name = DTYPE_NAME.get(dtype)
    if codec is not None and name in codec.spec.dtypes and not content.nbytes % dtype.itemsize:
        assert name is not None
        elements = content.view(dtype)
        encoded = content.new_empty(codec.spec.max_bytes(elements.numel(), name))
        size = codec.encode(elements, encoded)
        if size < content.nbytes:
            return encoded[:size], EncodedTensor(content.nbytes, size, dtype)
    return content, EncodedTensor(content.nbytes, content.nbytes)


def room_for(parcel: EncodedTensor, content: Tensor) -> Tensor:
    """Return where the bytes of ``parcel`` arrive: in ``content``, uint8 [num_bytes], or beside it to be decoded."""
    return content if parcel.dtype is None else content.new_empty(parcel.sent_bytes)


def unpack(codec: Codec | None, parcel: EncodedTensor, arrived: Tensor, content: Tensor) -> None:
    """Fill ``content``, uint8 [num_bytes], with what ``arrived`` in its `room_for`."""
    if parcel.dtype is not None:
        assert codec is not None
        codec.decode(arrived, content.view(parcel.dtype))
