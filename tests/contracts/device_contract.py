"""Contracts that devices and codecs keep, and what tests of them need: small models and tensors.

What every device promises, see `outsize.runtime.device.device`; what every codec promises, see `outsize.codecs.codec`.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from outsize.codecs.codec import DTYPE_NAME, Codec
from outsize.errors import BudgetExceededError, CodecError
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.runtime.device.device import Device
from outsize.storage.ledger import Arena, Ledger


def small_model(dtype: str = "bf16") -> ModelSpec:
    """Return a model of four units: two trained ones, a frozen one and an empty one."""
    return ModelSpec(
        dtype=dtype,
        units=(
            pack_unit(0, "embed", "embedding", [("embed.weight", (300, 33), True, True)]),
            pack_unit(1, "block", "block", [("w", (70, 70), True, True), ("b", (7,), True, False)]),
            pack_unit(2, "frozen", "block", [("f", (50, 50), False, True)]),
            pack_unit(3, "tied", "head", []),
        ),
    )


def pattern(numel: int, dtype: torch.dtype, seed: int, arena: Arena) -> Tensor:
    """Return an aligned tensor of random bits, NaN patterns included: storage must not look at values."""
    tensor = arena.take(numel * dtype.itemsize, "pattern")
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator))
    return tensor.view(dtype)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def raises(kind: type[BaseException], call: Callable[[], object]) -> bool:
    """Whether ``call`` raises ``kind``."""
    try:
        call()
    except kind:
        return True
    return False


MakeDevice = Callable[[Ledger | None], Device]


def check_device_memory_is_aligned_and_lies_on_it(make: MakeDevice) -> None:
    """Every allocation has the size asked for, on the device, aligned for DMA, apart from all others."""
    device = make(None)
    sizes = (1, 4096, 10_000)
    tensors = [device.allocate(size, "x") for size in sizes]
    for value, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (size,))
        assert tensor.device == device.torch_device
        assert tensor.data_ptr() % 512 == 0
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    device.close()


def check_device_memory_is_reserved_until_closed(make: MakeDevice) -> None:
    """The ledger knows every byte; beyond the budget nothing is allocated; closing gives everything back, twice."""
    ledger = Ledger({"device": 3 * 4096})
    device = make(ledger)
    device.allocate(8192, "x")
    assert ledger.used("device") == 8192
    assert raises(BudgetExceededError, lambda: device.allocate(8192, "y"))
    assert ledger.used("device") == 8192
    device.allocate(4096, "z")
    device.close()
    assert ledger.used("device") == 0
    device.close()


def check_device_copies_both_ways(make: MakeDevice) -> None:
    """What goes up and comes down again is the same bits, by way of two lanes and their marks."""
    device = make(None)
    with Arena() as arena:
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.uint8)):
            source = pattern(4096, dtype, seed, arena)
            back = pattern(4096, dtype, 99, arena)
            slot = device.allocate(source.nbytes, "slot").view(dtype)
            with device.lane("up:w0"):
                device.copy(slot, source)
                mark = device.record("up:w0")
            with device.lane("down:w0"):
                if mark is not None:
                    device.wait("down:w0", mark)
                device.copy(back, slot)
                mark = device.record("down:w0")
            if mark is not None:
                device.wait("host", mark)
            assert same_values(back, source), dtype
    device.close()


def check_device_orders_lanes_by_marks(make: MakeDevice) -> None:
    """A lane that waits for a mark sees all that was done before it, however often the memory is used again."""
    device = make(None)
    slot = device.allocate(4 * 2**16, "slot").view(torch.float32)
    sums = []
    mark = None
    for value in range(20):
        with device.lane("up:w0"):
            if mark is not None:
                device.wait("up:w0", mark)
            device.copy(slot, torch.full((2**16,), float(value)))
            mark = device.record("up:w0")
        with device.lane("compute:w0"):
            if mark is not None:
                device.wait("compute:w0", mark)
            sums.append(slot.sum())
            device.hold(sums[-1], "compute:w0")
            mark = device.record("compute:w0")
    if mark is not None:
        device.wait("host", mark)
    assert [total.item() for total in sums] == [value * 2**16 for value in range(20)]
    device.close()


DEVICE_CONTRACT: tuple[Callable[[MakeDevice], None], ...] = (
    check_device_memory_is_aligned_and_lies_on_it,
    check_device_memory_is_reserved_until_closed,
    check_device_copies_both_ways,
    check_device_orders_lanes_by_marks,
)


# Around block, row and group sizes, and nothing at all.
SIZES = (0, 1, 15, 16, 63, 64, 100, 2048, 5000, 16_384, 40_001)
TORCH_DTYPE = {name: dtype for dtype, name in DTYPE_NAME.items()}


class CodecContract:
    """Subclass it and say what `make` makes.

    A class, because most checks go over all dtypes of the codec. In a test file::

        class TestMyCodec(CodecContract):
            def make(self):
                return MyCodec()
    """

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
                assert same_values(decoded, source), name

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
            assert same_values(source, copy)
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
            assert same_values(decoded, source)
            return
        group = codec.spec.group or max(source.numel(), 1)
        for one, other in zip(torch.split(source, group), torch.split(decoded, group), strict=True):
            if not one.numel() or not one.isfinite().all():
                continue
            one_fp64, other_fp64 = one.double(), other.double()
            spread = float(one_fp64.abs().max())
            # Half an ulp of the dtype on top: the decoded value has to be written in it.
            # Steps are never below 2^-126.
            rounding = (
                float(other_fp64.abs().max()) * torch.finfo(one.dtype).eps + torch.finfo(one.dtype).tiny
            )
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
