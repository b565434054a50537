"""Kernels of codecs on a GPU have the bits of the torch forms, and a LOAD is a few of them.

Without a GPU they run in Triton's interpreter on the CPU, where Triton is installed; that of torch for the CPU is not.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contracts import same_values
from contracts.device_contract import TORCH_DTYPE, normal
from outsize.codecs import blockwise, codec, frozen
from outsize.codecs.blockwise import OnDevice
from outsize.codecs.codec import open_codec
from outsize.codecs.codec_spec import BLOCKWISE

# Before the environment changes, which all tests of a process share.
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.cuda

LOSSLESS = ("lossless4", "lossless3")
NAMES = ("nf4", "nf4-double", *(spec.name for spec in BLOCKWISE), *LOSSLESS)
# Around blocks of 64, groups of 128, rows of 16, spans of 2,048, blocks of 16,384; and beyond 1,024 spans.
LENGTHS = (1, 15, 16, 63, 65, 128, 257, 2049, 16_384, 3 * 16_384 + 16 * 100 + 7)
LENGTHS += () if INTERPRETED else (2**21 + 16_385,)


@pytest.fixture(autouse=True)
def _by_kernels_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the host's own kernels out, and interpret those of a GPU where there is none."""
    for module in (blockwise, frozen):
        monkeypatch.setattr(module, "native_serves", lambda *_: False)


def use(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr(codec, "device_kernels", lambda kind: kernels)


def kernels_here() -> Any:
    if INTERPRETED:
        from outsize.codecs import device_kernels

        return device_kernels
    return codec.device_kernels(DEVICE)


def members(numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield normal elements, then some of all that is not, then subnormal ones, zeros of both signs and a constant."""
    usual = normal(numel, torch.float32)
    yield usual.to(dtype)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-40, 3e38, -3e38, 2.0**-126])
    places = torch.arange(0, numel, 311)
    unusual = usual.clone()
    unusual[places] = odd[torch.arange(len(places)) % len(odd)]
    yield unusual.to(dtype)
    yield (usual * 1e-39).to(dtype)
    yield torch.where(torch.arange(numel) % 2 > 0, 0.0, -0.0).to(dtype)
    yield torch.full((numel,), -3.75, dtype=dtype)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal, but for those of NaN, which differ between a host and a GPU."""
    number = ~one.isnan()
    return torch.equal(number, ~other.isnan()) and same_values(one[number], other[number])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_have_the_bits_of_torch(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    kernels = kernels_here()
    assert kernels is not None, "Triton is installed and cannot be used here"
    opened = open_codec(name).seeded(2**61 + 12_345)
    for numel in LENGTHS:
        for source in members(numel, TORCH_DTYPE[dtype]):
            room = torch.empty(opened.spec.max_bytes(numel, dtype), dtype=torch.uint8)
            use(monkeypatch, None)
            encoded = room[: opened.encode(source, room)].to(DEVICE)
            by_torch, by_kernel = (torch.full_like(source, 7.0, device=DEVICE) for _ in range(2))
            opened.decode(encoded, by_torch)
            use(monkeypatch, kernels)
            opened.decode(encoded, by_kernel)
            if name in LOSSLESS:
                assert same_values(by_kernel.cpu(), source)
                continue
            assert same(by_torch.cpu(), by_kernel.cpu())
            if name.startswith("nf4"):
                continue
            written = torch.empty_like(encoded)
            assert opened.encode(source.to(DEVICE), written) == encoded.numel()
            assert torch.equal(written, encoded)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_pieces_are_decoded_at_once_and_one_that_is_as_it_was_alone(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    opened, size, launched = open_codec(name), 2 * 16_384 + 2048, []
    kernels = kernels_here()
    use(monkeypatch, kernels)
    monkeypatch.setattr(kernels, "_launch", count_calls(kernels._launch, launched))
    noise = torch.randint(-(2**15), 2**15, (4, size), dtype=torch.int16).view(torch.float16)
    for plane in (normal(3 * size + 4097, TORCH_DTYPE[dtype]), noise.to(TORCH_DTYPE[dtype]).view(-1)):
        stride = opened.spec.max_bytes(size, dtype)
        pieces = plane.split(size)
        room = torch.zeros(len(pieces) * stride, dtype=torch.uint8)
        sizes = [opened.encode(piece, part) for piece, part in zip(pieces, room.split(stride), strict=True)]
        launched.clear()
        into = torch.empty_like(plane, device=DEVICE)
        opened.decode_pieces(room.to(DEVICE), sizes, into, size)
        assert same_values(into.cpu(), plane)
        as_it_was = any(length == piece.nbytes for length, piece in zip(sizes, pieces, strict=True))
        assert len(launched) == 1 or as_it_was


def count_calls(launch: Any, calls: list[Any]) -> Any:
    def counted(*arguments: Any, **constants: Any) -> None:
        calls.append(arguments)
        launch(*arguments, **constants)

    return counted


class Kernels(TorchDispatchMode):
    """Counts the operations of torch that are a kernel each, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(
            returned.alias_info is not None and not returned.alias_info.is_write
            for returned in func._schema.returns
        )
        self.count += not (views or func._schema.name.startswith("aten::empty"))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", NAMES)
def test_a_plane_is_decoded_in_one_kernel_whatever_its_length(name: str, monkeypatch: pytest.MonkeyPatch):
    kernels = kernels_here()
    opened, launched = open_codec(name), []
    source = normal(2**18 + 16_400 if INTERPRETED else 2**25 + 77, torch.bfloat16)
    room = torch.empty(opened.spec.max_bytes(source.numel(), "bf16"), dtype=torch.uint8)
    encoded, into = room[: opened.encode(source, room)].to(DEVICE), torch.empty_like(source, device=DEVICE)
    use(monkeypatch, kernels)
    monkeypatch.setattr(kernels, "_launch", lambda *_, **form: launched.append(form))
    opened.decode(encoded, into)  # constants go there once
    launched.clear()
    with Kernels() as of_torch:
        opened.decode(encoded, into)
    assert of_torch.count + len(launched) == 1


def test_a_constant_is_copied_to_a_device_once():
    constant = OnDevice(torch.arange(3))
    assert constant.on(DEVICE) is constant.on(DEVICE)
    assert constant.on(DEVICE).tolist() == [0, 1, 2]


def test_kernels_that_give_other_bits_are_not_used_and_said(monkeypatch: pytest.MonkeyPatch):
    kernels = kernels_here()
    monkeypatch.setattr(codec, "TRITON_KINDS", (DEVICE.type,))
    codec.device_kernels.cache_clear()
    assert codec.device_kernels(DEVICE) is kernels
    codec.device_kernels.cache_clear()
    monkeypatch.setattr(kernels, "decode_nf4", lambda *arguments: arguments[-1].fill_(1))
    with pytest.warns(UserWarning, match="kernels of nf4, nf4-double give other bits"):
        assert codec.device_kernels(DEVICE) is None
    codec.device_kernels.cache_clear()
