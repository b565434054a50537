"""Off the host a piece costs launches, whatever its size: few large ones there, with the bits of many small ones."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.device_contract import encode, normal
from outsize.codecs import blockwise, frozen
from outsize.codecs.codec import open_codec
from outsize.codecs.codec_spec import SPECS
from outsize.codecs.transport import PIECE_ELEMENTS, Transport, staging_bytes
from outsize.codecs.window import WindowCodec
from outsize.codecs.window_layout import WindowSections
from outsize.model.sizes.model_spec import pack_unit
from outsize.runtime.ops import gradient_ops
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.link_codecs import GradientCarrier, bring_up

# Of one block of an 8B model, its largest matrix, and that of a 70B one.
LARGEST = (4096 * 14336, 8192 * 28672)
PIECED = ("nf4", "nf4-double", "int8", "int8-asymmetric", "int4", "int4-asymmetric", "int8-stochastic")


class Kernels(TorchDispatchMode):
    """Counts the operations that are a kernel each, and knows those for which a lane would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(
            returned.alias_info is not None and not returned.alias_info.is_write
            for returned in func._schema.returns
        )
        made = func._schema.name in ("aten::empty.memory_format", "aten::empty")
        self.count += not (views or made)
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.waits.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("numel", LARGEST)
@pytest.mark.parametrize("name", ["nf4", "nf4-double", "int8", "fp8"])
def test_a_matrix_is_decoded_in_a_few_tens_of_kernels(name: str, numel: int):
    """By torch, where there is no Triton: 6,656 for a block of 8B in nf4 where pieces were those of the host."""
    codec = open_codec(name)
    into = torch.empty(numel, dtype=torch.bfloat16, device="meta")
    encoded = torch.empty(codec.spec.max_bytes(numel, "bf16"), dtype=torch.uint8, device="meta")
    with Kernels() as kernels:
        codec._decode(encoded, into)
    assert 0 < kernels.count <= (4 if name in ("int8", "fp8") else 12 + 5 * -(-numel // 2**24))
    assert kernels.waits == []


def test_the_gradient_of_a_block_is_narrowed_in_eight_kernels():
    """A block of 70B; 832 pieces of a block of 8B, where pieces were those of the host."""
    plane = torch.empty(855_654_400, device="meta")
    with Kernels() as kernels:
        gradient_ops._narrowed(plane, torch.bfloat16)
    assert kernels.count <= 8
    assert kernels.waits == []


@pytest.mark.parametrize("name", ["int8", "int8-asymmetric", "int8-stochastic"])
def test_gradients_are_encoded_without_a_wait(name: str):
    numel = 2**20
    codec = open_codec(name)
    source = torch.empty(numel, dtype=torch.float32, device="meta")
    with Kernels() as kernels:
        codec._encode(
            source, torch.empty(codec.spec.max_bytes(numel, "fp32"), dtype=torch.uint8, device="meta")
        )
    assert kernels.count <= 28
    assert kernels.waits == []


class Launches:
    """In the place of kernels by Triton: counts how often one is launched."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        def launch(*_: Any) -> None:
            self.count += 1

        return launch


DEVICE: Any = SimpleNamespace(
    link=lambda _: nullcontext(),
    here=lambda: None,
    rejoin=lambda _: None,
    beside=lambda _, work: work(),
)
BLOCK = 218_112_000  # of an 8B Llama


MOST = 8


@pytest.mark.parametrize("name", SPECS)
def test_the_load_of_a_block_is_decoded_in_eight_launches(name: str):
    """By Triton's kernels, and where a codec has none by torch's; whichever comes up."""
    kernels, into = Launches(), torch.empty(BLOCK, dtype=torch.bfloat16, device="meta")
    codec = open_codec(name).by(kernels)
    if isinstance(codec, WindowCodec):
        pieces = [
            torch.empty(
                WindowSections(codec._layout(into.dtype), part.numel()).num_bytes(0), dtype=torch.uint8
            )
            for part in into.split(PIECE_ELEMENTS)  # type: ignore[no-untyped-call]
        ]
        size = staging_bytes(Transport(weights=name), "weights", (BLOCK, "bf16"))
        staging = [torch.empty(size, dtype=torch.uint8, device="meta") for _ in range(2)]
        bring_up(DEVICE, codec, [piece.to("meta") for piece in pieces], into, staging)
        assert 0 < kernels.count <= MOST
        return
    encoded = torch.empty(codec.spec.max_bytes(BLOCK, "bf16"), dtype=torch.uint8, device="meta")
    with Kernels() as counted:
        codec.decode(encoded, into)
    assert 0 < kernels.count + counted.count <= MOST
    assert counted.waits == []


def test_the_gradient_of_a_block_goes_down_in_pieces_that_take_less_to_launch_than_to_copy():
    kernels, transport = Launches(), Transport(gradients="int8")
    codec = open_codec("int8").by(kernels)
    size = staging_bytes(transport, "gradients", (BLOCK, "fp32"))
    rooms = [torch.empty(size, dtype=torch.uint8, device="meta") for _ in range(4)]
    carrier = GradientCarrier(codec, DEVICE, rooms[:2], rooms[2:])
    plane = torch.empty(BLOCK, device="meta")
    unit = pack_unit(0, "block", "block", [("weight", (BLOCK,), True, True)])
    context = StepContext(number=0, learning_rate=0.1, microbatches=(), touched={0: frozenset({0})})
    with Kernels() as counted:
        carrier.bring_home(unit, plane, torch.empty_like(plane), context)
    assert kernels.count == 2 * 27  # there and, since all of this lies on one device, back
    assert counted.count <= 28  # a copy each, and zeros for what lies between tensors
    assert counted.waits == []


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("name", PIECED)
def test_large_pieces_have_the_bits_of_small_ones(name: str, finite: bool, monkeypatch: pytest.MonkeyPatch):
    source = normal(3 * 2**18 + 4097, torch.float32)
    if not finite:
        source[[5, 2**18 + 9, 3 * 2**18 + 4000]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    for module in (frozen, blockwise):
        monkeypatch.setattr(module, "native_serves", lambda *_: False)
    found = []
    for large in (False, True):
        if large:
            for module in (frozen, blockwise):
                monkeypatch.setattr(module, "pieces_on", lambda device, on_host: 2**24)
        codec = open_codec(name)
        encoded = encode(codec, source)
        into = torch.empty(source.numel(), dtype=torch.bfloat16)
        codec.decode(encoded, into)
        found.append((encoded, into.view(torch.int16)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_gradients_are_rounded_alike_in_large_pieces(monkeypatch: pytest.MonkeyPatch):
    plane = normal(2**20 + 5, torch.float32)
    small = gradient_ops._narrowed(plane.clone(), torch.bfloat16).clone()
    monkeypatch.setattr(gradient_ops, "pieces_on", lambda device, on_host: 2**24)
    assert torch.equal(gradient_ops._narrowed(plane.clone(), torch.bfloat16), small)
