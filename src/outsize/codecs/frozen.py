"""Codecs of frozen weights: NF4, on the levels of a normal distribution, and FP8, small floats times a scale.

NF4 is the format of QLoRA (Dettmers et al., 2023, section 3 and appendix E): 64 neighbours share the largest magnitude
among them, and each is the nearest of 16 fixed fractions of it. With double quantisation these magnitudes are numbers
of 8 bits over the range of 256 of them; the paper takes 8-bit floats there, here steps are equal.

An encoding is the codes of all blocks, two to a byte, the first in the lower half; then the magnitudes, fp32; or, with
double quantisation, least and step of each 256 magnitudes, fp32, then a byte for each. A last block that is shorter is
filled up with zeros. Blocks that are not finite decode to NaN, and with double quantisation so do their 255 neighbours.
On the host, where its kernels are built, C does the work of blocks; on a GPU, Triton where it is.

FP8 is the format of "FP8 formats for deep learning" (Micikevicius et al., 2022): 4 bits of exponent, 3 of mantissa
(e4m3), 448 the largest, no infinity. A scale is the largest magnitude of 128 neighbours by 448, in bf16. So an element
is off by a sixteenth of itself at most, whatever stands beside it, down to 1/28,672 of that magnitude; a smaller one by
half a subnormal step, 2^-10 of the scale. Zeros keep their sign. Groups that are not finite decode to NaN. An encoding
is the scales of all groups, then a byte for each element, the last group filled up with zeros. Decoding takes no memory
beside the elements.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from outsize import native
from outsize.codecs.blockwise import LEAST_SCALE, PIECE_ELEMENTS, OnDevice, whole_groups
from outsize.codecs.codec import Codec, pieces_on
from outsize.codecs.codec_spec import FP8_GROUP, NF4_BLOCK, NF4_DOUBLE_BLOCKS, NF4_LEVELS, CodecSpec

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


# 131,072 elements are 512 KiB of fp32: a piece and what is made of it stay in a cache.
_PIECE_BLOCKS = 2048
_BYTES, _STEPS = 256, 255
# Keeps a block of zeros from dividing by zero.
_LEAST = 2.0**-149


class NF4Codec(Codec):
    """NF4, see this file.

    Args:
        spec: see `outsize.codecs.codec_spec.NF4` and ``NF4_DOUBLE``.
        double: whether magnitudes are quantised as well.
    """

    def __init__(self, spec: CodecSpec, *, double: bool = False) -> None:
        self.spec = spec
        self._double = double
        levels = torch.tensor(NF4_LEVELS, dtype=torch.float32)
        self._borders = ((levels[1:] + levels[:-1]) / 2).tolist()
        self._levels = OnDevice(levels)
        codes = torch.arange(_BYTES)
        # A pair of levels for each byte, looked up as one number of 64 bits.
        pairs = torch.stack([levels[codes & 15], levels[codes >> 4]], dim=1)
        self._pairs = OnDevice(pairs.view(torch.int64).view(-1))

    def _encode(self, source: Tensor, into: Tensor) -> int:
        blocks = -(-source.numel() // NF4_BLOCK)
        codes, rest = into[: blocks * NF4_BLOCK // 2].view(blocks, -1), blocks * NF4_BLOCK // 2
        scales = torch.empty(blocks, dtype=torch.float32, device=source.device)
        if native_serves(source, into):
            native_encode(self._borders, source, codes, scales)
            return rest + self._write_scales(scales, into[rest:])
        for first in range(0, blocks, _PIECE_BLOCKS):
            last = min(first + _PIECE_BLOCKS, blocks)
            values = torch.zeros(last - first, NF4_BLOCK, dtype=torch.float32, device=source.device)
            piece = source[first * NF4_BLOCK : last * NF4_BLOCK]
            values.view(-1)[: piece.numel()] = piece
            largest = values.abs().amax(1)
            scales[first:last] = largest
            values /= largest.clamp_min(_LEAST)[:, None]
            nearest = self._nearest(values)
            codes[first:last] = nearest[:, 0::2] | nearest[:, 1::2] << 4
        scales[~scales.isfinite()] = torch.nan
        return rest + self._write_scales(scales, into[rest:])

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        blocks = -(-into.numel() // NF4_BLOCK)
        codes = encoded[: blocks * NF4_BLOCK // 2]
        if (kernels := self.kernels_on(into.device)) is not None:
            table, numbers = self._scale_parts(encoded[len(codes) :], blocks)
            kernels.decode_nf4(codes, table, numbers, self._levels.on(into.device), into)
            return
        scales = self._read_scales(encoded[len(codes) :], blocks)
        if native_serves(into, codes):
            native_decode(NF4_LEVELS, codes, scales, into)
            return
        pairs = self._pairs.on(into.device)
        half = NF4_BLOCK // 2
        step = pieces_on(into.device, _PIECE_BLOCKS * NF4_BLOCK) // NF4_BLOCK
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            values = pairs.index_select(0, codes[first * half : last * half].int()).view(torch.float32)
            blocked = values.view(last - first, NF4_BLOCK).mul_(scales[first:last, None])
            piece = into[first * NF4_BLOCK : last * NF4_BLOCK]
            piece.copy_(blocked.view(-1)[: piece.numel()])

    def _nearest(self, values: Tensor) -> Tensor:
        """Return the number of the level next to each value, uint8: how many borders lie below it."""
        count = torch.zeros_like(values, dtype=torch.uint8)
        for border in self._borders:
            count += (values > border).view(torch.uint8)
        return count

    def _write_scales(self, scales: Tensor, into: Tensor) -> int:
        """Write magnitudes [blocks]; returns the bytes."""
        if not self._double:
            into[: scales.nbytes].copy_(scales.view(torch.uint8))
            return scales.nbytes
        groups = -(-len(scales) // NF4_DOUBLE_BLOCKS)
        padded = scales[-1].repeat(groups * NF4_DOUBLE_BLOCKS)
        padded[: len(scales)] = scales
        rows = padded.view(groups, NF4_DOUBLE_BLOCKS)
        least = rows.amin(1)
        step = (rows.amax(1) - least) / _STEPS
        numbers = ((rows - least[:, None]) / step.clamp_min(_LEAST)[:, None]).round_().nan_to_num_(0.0)
        table = torch.stack([least, step], dim=1)
        into[: table.nbytes].copy_(table.view(-1).view(torch.uint8))
        into[table.nbytes : table.nbytes + len(scales)] = numbers.clamp_(0, _STEPS).view(-1)[: len(scales)]
        return table.nbytes + len(scales)

    def _scale_parts(self, encoded: Tensor, blocks: int) -> tuple[Tensor, Tensor | None]:
        """Return magnitudes, fp32 [blocks]; or least and step of groups, fp32 [2 * groups], and uint8 [blocks]."""
        end = -(-blocks // NF4_DOUBLE_BLOCKS) * 8 if self._double else encoded.numel()
        return encoded[:end].view(torch.float32), encoded[end:] if self._double else None

    def _read_scales(self, encoded: Tensor, blocks: int) -> Tensor:
        """Return magnitudes, fp32 [blocks]."""
        table, numbers = self._scale_parts(encoded, blocks)
        if numbers is None:
            return table
        least, step = table.view(-1, 2).repeat_interleave(NF4_DOUBLE_BLOCKS, dim=0)[:blocks].unbind(1)
        return numbers.float().mul_(step).add_(least)


_LARGEST = 448.0
# For each dtype its words, how far a code is shifted in them, and what makes up for the bias of its exponents.
_WORDS = {
    torch.float32: (torch.int32, 20, 2.0**120),
    torch.bfloat16: (torch.int16, 4, 2.0**120),
    torch.float16: (torch.int16, 7, 2.0**8),
}


class FP8Codec(Codec):
    """FP8, see this file.

    Args:
        spec: see `outsize.codecs.codec_spec.FP8`.
    """

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def _encode(self, source: Tensor, into: Tensor) -> int:
        scales, codes = self._sections(into, source.numel())
        for elements, groups in whole_groups(source.numel(), FP8_GROUP, PIECE_ELEMENTS):
            x = source[elements].float().view(groups.stop - groups.start, -1)
            scale = (x.abs().amax(1) / _LARGEST).clamp_min_(LEAST_SCALE).bfloat16()
            scales[groups] = scale.masked_fill_(~scale.isfinite(), torch.nan)
            x = x / scale.float()[:, None]
            codes[elements] = x.view(-1).to(torch.float8_e4m3fn).view(torch.int8)
        codes[source.numel() :].zero_()
        return scales.nbytes + codes.nbytes

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        scales, codes = self._sections(encoded, into.numel())
        on_host = into.device.type == "cpu"
        for elements, groups in whole_groups(
            into.numel(), FP8_GROUP, PIECE_ELEMENTS if on_host else into.numel()
        ):
            values = into[elements]
            if on_host:
                _cast(codes[elements], values)
            else:
                values.copy_(codes[elements].view(torch.float8_e4m3fn))
            values.view(groups.stop - groups.start, -1).mul_(scales[groups, None])

    def _sections(self, encoded: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return scales, bf16 [groups], and codes of whole groups, int8."""
        groups = -(-numel // FP8_GROUP)
        scales, codes = encoded[: 2 * groups], encoded[2 * groups : (2 + FP8_GROUP) * groups]
        return scales.view(torch.bfloat16), codes.view(torch.int8)


def _cast(codes: Tensor, into: Tensor) -> None:
    """Fill ``into`` with the floats that ``codes``, int8 on the host, are: six times as fast there as torch's own cast.

    Shifted in a wider word, the bits of a code are a float that is smaller by a power of two, a subnormal one as well.
    """
    word, shift, bias = _WORDS[into.dtype]
    bits = torch.iinfo(word).min + (0x7F << shift)
    into.view(word).copy_(codes).bitwise_left_shift_(shift).bitwise_and_(bits)
    into.mul_(bias)
