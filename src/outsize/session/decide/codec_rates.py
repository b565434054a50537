"""What codecs reach on this machine: weights are encoded by a core at home and decoded on the device, others there."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from outsize.accelerators import synchronize
from outsize.codecs.codec import DTYPE_NAME, Codec
from outsize.codecs.open import open_codec
from outsize.codecs.transport import PIECE_ELEMENTS, CodecRates, Transport
from outsize.model.sizes.model_spec import ITEMSIZE
from outsize.planner.memory.link_bytes import encoded_planes
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.session.job.prepare import Job

REPEATS = 3
HOME = "cpu"
# Of the normal weights that are measured; any deviation gives the same exponents but for a shift.
DEVIATION = 0.02


def codec_rates(prepared: Job, transport: Transport) -> CodecRates | None:
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
    return _rates_of(open_codec(transport.weights), _sample(numel, dtype), HOME, _device(prepared))


def crossing_rates(prepared: Job, transport: Transport) -> dict[str, CodecRates]:
    """Measure the codecs of gradients and activations, which encode on the device, as far as these go encoded.

    Args:
        prepared: the run.
        transport: names the codecs.
    """
    spec, device = prepared.split.spec, _device(prepared)
    samples = {
        "gradients": (max(unit.numel for unit in spec.units), "fp32", HOME),
        "activations": (max(prepared.measured.boundary_bytes) // ITEMSIZE[spec.dtype], spec.dtype, device),
    }
    return {
        crossing: _rates_of(open_codec(transport.spec(crossing).name), _sample(numel, dtype), device, decoder)
        for crossing, (numel, dtype, decoder) in samples.items()
        if numel and not transport.is_raw(crossing)
    }


def _device(prepared: Job) -> str:
    """Return where torch computes for the run: its first device."""
    return str(prepared.machine.devices.torch_device)


def _sample(numel: int, dtype: str) -> Tensor:
    source = torch.randn(min(numel, PIECE_ELEMENTS), generator=torch.Generator().manual_seed(0))
    return (source * DEVIATION).to(TORCH_DTYPE[dtype])


def _rates_of(codec: Codec, sample: Tensor, encoder: str, decoder: str) -> CodecRates:
    """Return what ``codec`` reaches on ``sample``, in bytes of it, encoding on one device and decoding on another."""
    source = sample.to(encoder)
    room = torch.empty(
        codec.spec.max_bytes(sample.numel(), DTYPE_NAME[sample.dtype]), dtype=torch.uint8, device=encoder
    )
    size = codec.encode(source, room)  # of a device, the first one compiles and allocates
    there, into = room[:size].to(decoder), torch.empty_like(sample, device=decoder)
    codec.decode(there, into)
    return CodecRates(
        encode_bytes_per_s=sample.nbytes / _best_s(lambda: codec.encode(source, room), encoder),
        decode_bytes_per_s=sample.nbytes / _best_s(lambda: codec.decode(there, into), decoder),
    )


def _best_s(work: Callable[[], object], device: str) -> float:
    def done() -> None:
        work()
        synchronize(device)

    return min(_seconds(done) for _ in range(REPEATS))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return max(time.perf_counter() - started, 1e-9)
