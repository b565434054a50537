"""What a codec of weights reaches on this machine: on a core at home, and on the device that decodes."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from outsize.codecs.codec import Codec
from outsize.codecs.open import open_codec
from outsize.codecs.transport import PIECE_ELEMENTS, CodecRates, Transport
from outsize.planner.transport import encoded_planes
from outsize.runtime.binding import TORCH_DTYPE
from outsize.train.prepare import Prepared

REPEATS = 3
# Of the normal weights that are measured; any deviation gives the same exponents but for a shift.
DEVIATION = 0.02


def codec_rates(prepared: Prepared, transport: Transport) -> CodecRates | None:
    """Measure the codec of weights on a piece of normal ones; None where they go as they are.

    Args:
        prepared: the run.
        transport: names the codec.
    """
    if transport.is_raw("weights"):
        return None
    spec = prepared.split.spec
    sizes = [(numel, dtype) for unit in spec.units for _, numel, dtype in encoded_planes(unit, spec.dtype)]
    numel, dtype = max(sizes)
    source = torch.randn(min(numel, PIECE_ELEMENTS), generator=torch.Generator().manual_seed(0))
    codec, weights = open_codec(transport.weights), (source * DEVIATION).to(TORCH_DTYPE[dtype])
    room = torch.empty(codec.spec.max_bytes(weights.numel(), dtype), dtype=torch.uint8)
    size = codec.encode(weights, room)
    encode_s = min(_seconds(lambda: codec.encode(weights, room)) for _ in range(REPEATS))
    device = prepared.machine.device.partition(",")[0]
    decode_s = _decode_s(codec, room[:size], weights, device if device.startswith("cuda") else "cpu")
    return CodecRates(
        encode_bytes_per_s=weights.nbytes / encode_s, decode_bytes_per_s=weights.nbytes / decode_s
    )


def _decode_s(codec: Codec, encoded: Tensor, weights: Tensor, device: str) -> float:
    there, into = encoded.to(device), torch.empty_like(weights, device=device)

    def decode() -> None:
        codec.decode(there, into)
        if device != "cpu":
            torch.cuda.synchronize(device)

    decode()  # of a device, the first one compiles and allocates
    return min(_seconds(decode) for _ in range(REPEATS))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return max(time.perf_counter() - started, 1e-9)
