"""What every codec promises, see `outsize.codecs.codec`.

A class, because most checks go over all dtypes of the codec. In a test file::

    class TestMyCodec(CodecContract):
        def make(self):
            return MyCodec()
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from outsize.codecs.codec import DTYPE_NAME, Codec
from outsize.errors import CodecError
from outsize.testing.samples import raises, same_bits

# Around block, row and group sizes, and nothing at all.
SIZES = (0, 1, 15, 16, 63, 64, 100, 2048, 5000, 16_384, 40_001)
TORCH_DTYPE = {name: dtype for dtype, name in DTYPE_NAME.items()}


class CodecContract:
    """Subclass it and say what `make` makes."""

    def make(self) -> Codec:
        """Return the codec under test."""
        raise NotImplementedError("say which codec is under test")

    def test_says_its_size_before_it_encodes(self) -> None:
        """No encoding is longer than announced, and one of a fixed rate is as long as announced."""
        codec = self.make()
        for source in self.sources(codec):
            dtype, numel = DTYPE_NAME[source.dtype], source.numel()
            most = codec.spec.max_bytes(numel, dtype)
            size = encode(codec, source).numel()
            assert size == most if codec.spec.fixed_rate else size <= most, (dtype, numel)
            assert codec.spec.expected_bytes(numel, dtype) <= most

    def test_writes_nothing_behind_its_encoding(self) -> None:
        """What lies behind the room that was asked for stays."""
        codec = self.make()
        for source in self.sources(codec):
            most = codec.spec.max_bytes(source.numel(), DTYPE_NAME[source.dtype])
            room = torch.full((most + 64,), 77, dtype=torch.uint8)
            codec.encode(source, room)
            assert (room[most:] == 77).all()

    def test_decodes_what_it_encoded(self) -> None:
        """Bit for bit where it is lossless, within its error elsewhere; shapes do not matter."""
        codec = self.make()
        for source in self.sources(codec):
            decoded = torch.full_like(source, 3.0)
            codec.decode(encode(codec, source), decoded)
            self.check_decoded(codec, source, decoded)
        dtype = TORCH_DTYPE[codec.spec.dtypes[0]]
        matrix = normal(640, dtype).view(20, 32)
        decoded = torch.empty_like(matrix)
        codec.decode(encode(codec, matrix), decoded)
        self.check_decoded(codec, matrix.view(-1), decoded.view(-1))

    def test_keeps_every_pattern_of_16_bits(self) -> None:
        """NaN payloads, subnormals, infinities and −0 too, in order, at random and one kind at a time."""
        codec = self.make()
        if not codec.spec.lossless:
            return
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
        runs = every[::257].repeat_interleave(64)
        for name in codec.spec.dtypes:
            for bits in (every, shuffled, runs, torch.zeros(5000, dtype=torch.int16)):
                source = bits.clone().view(TORCH_DTYPE[name])
                decoded = torch.zeros_like(source)
                codec.decode(encode(codec, source), decoded)
                assert same_bits(decoded, source), name

    def test_is_deterministic(self) -> None:
        """The same elements give the same bytes, whatever lay in the buffers before."""
        codec = self.make()
        for source in self.sources(codec):
            one, other = encode(codec, source, fill=0), encode(codec, source.clone(), fill=255)
            assert torch.equal(one, other)

    def test_leaves_its_source_alone(self) -> None:
        """Encoding does not change what is encoded, nor decoding the encoding."""
        codec = self.make()
        for source in self.sources(codec):
            copy = source.clone()
            encoded = encode(codec, source)
            encoded_copy = encoded.clone()
            codec.decode(encoded, torch.empty_like(source))
            assert same_bits(source, copy)
            assert torch.equal(encoded, encoded_copy)

    def test_refuses_what_does_not_fit(self) -> None:
        """Other dtypes, strides and too little room are ValueError, another count of bytes is CodecError."""
        codec = self.make()
        dtype = TORCH_DTYPE[codec.spec.dtypes[0]]
        source = normal(4096, dtype)
        room = torch.zeros(codec.spec.max_bytes(4096, codec.spec.dtypes[0]), dtype=torch.uint8)
        assert raises(ValueError, lambda: codec.encode(source.to(torch.float64), room))
        assert raises(ValueError, lambda: codec.encode(source[::2], room))
        assert raises(ValueError, lambda: codec.encode(source, room[:-1]))
        assert raises(ValueError, lambda: codec.encode(source, room.view(torch.int8)))
        assert not room.any()
        encoded = encode(codec, source)
        assert raises(ValueError, lambda: codec.decode(encoded, source.to(torch.float64)))
        assert raises(ValueError, lambda: codec.decode(encoded, normal(8192, dtype)[::2]))
        assert raises(CodecError, lambda: codec.decode(encoded, normal(16, dtype)))
        assert raises(CodecError, lambda: codec.decode(encoded[:0], source))

    def sources(self, codec: Codec) -> Iterator[Tensor]:
        """Yield tensors of all dtypes and many sizes."""
        for name in codec.spec.dtypes:
            for numel in SIZES:
                yield normal(numel, TORCH_DTYPE[name])

    def check_decoded(self, codec: Codec, source: Tensor, decoded: Tensor) -> None:
        """Raise AssertionError where ``decoded`` [n] is further from ``source`` [n] than the codec promises."""
        if codec.spec.lossless:
            assert same_bits(decoded, source)
            return
        group = codec.spec.group or max(source.numel(), 1)
        for one, other in zip(torch.split(source, group), torch.split(decoded, group), strict=True):
            if not one.numel() or not one.isfinite().all():
                continue
            one_fp64, other_fp64 = one.double(), other.double()
            spread = float(one_fp64.abs().max())
            # Half an ulp of the dtype on top: the decoded value has to be written in it.
            # Steps are never below 2^-126, and what all elements of a rotated group lose may add up in one.
            least = torch.finfo(one.dtype).tiny * (group if codec.spec.rotated else 1)
            rounding = float(other_fp64.abs().max()) * torch.finfo(one.dtype).eps + least
            assert float((one_fp64 - other_fp64).abs().max()) <= codec.spec.error * spread + rounding


def encode(codec: Codec, source: Tensor, fill: int = 0) -> Tensor:
    """Return the encoding of ``source``, in a buffer that was ``fill`` everywhere."""
    most = codec.spec.max_bytes(source.numel(), DTYPE_NAME[source.dtype])
    room = torch.full((most,), fill, dtype=torch.uint8)
    return room[: codec.encode(source, room)]


def normal(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return ``numel`` weights as networks have them: normal, deviation 0.02."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 0.02).to(dtype)
