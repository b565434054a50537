import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts import HOME_CONTRACT, same_values, small_model
from contracts.device_contract import normal
from contracts.home_contract import planes_for
from outsize.codecs.codec import open_codec
from outsize.codecs.transport import PIECE_ALIGN, PIECE_ELEMENTS, room_bytes
from outsize.errors import StorageError
from outsize.storage.encoded_planes import EncodedRoom, PackedPlane
from outsize.storage.home import HostHome
from outsize.storage.ledger import Arena


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 400)), max_size=30))
def test_stretches_never_overlap_and_come_back_whole(changes):
    """Whatever is taken and given back, in any order: what is left in the end is one stretch."""
    room, held = EncodedRoom(2048), {}
    for name, size in changes:
        if name in held:
            room.give(*held.pop(name))
        start = room.take(size)
        if start is not None:
            held[name] = start, size
        spans = sorted(held.values())
        assert all(one + length <= other for (one, length), (other, _) in itertools.pairwise(spans))
        assert all(start % PIECE_ALIGN == 0 for start, _ in spans)
    for start, size in held.values():
        room.give(start, size)
    assert room.free_bytes == 2048
    assert room.take(2048) == 0


@pytest.mark.parametrize("check", HOME_CONTRACT, ids=lambda check: check.__name__)
def test_a_home_with_packed_planes_is_a_home(check):
    with Arena() as arena:
        check(lambda model: HostHome(model, planes_for(model.dtype), arena, open_codec("raw")))


def test_only_weights_that_do_not_train_are_packed():
    with Arena() as arena:
        home = HostHome(small_model(), planes_for("bf16"), arena, open_codec("lossless4"))
        assert home.packed(2, "weights") is not None
        assert home.packed(0, "weights") is None
        assert home.view(0, "weights").numel()
        with pytest.raises(ValueError, match="'weights' of unit 2 does not lie in memory as it is"):
            home.view(2, "weights")
        home.close()


def test_ranges_are_kept_bit_for_bit_and_pieces_make_room_for_each_other():
    """Written whole, in part, and again: each time a piece is a little longer or shorter than it was."""
    step, numel = PIECE_ELEMENTS // 4, 2 * PIECE_ELEMENTS + 2048
    codec = open_codec("lossless4")
    memory = torch.zeros(room_bytes(codec.spec, numel, "bf16"), dtype=torch.uint8)
    plane, plain = PackedPlane(numel, torch.bfloat16, codec, memory), torch.zeros(numel).bfloat16()
    for seed, (first, count) in enumerate(((4, 4), (0, 9), (3, 2), (0, 1), (4, 5))):
        start, stop = first * step, min((first + count) * step, numel)
        source = normal(stop - start, torch.bfloat16, seed) * (1 + seed)
        plain[start:stop] = source
        plane.write(start, source)
        into = torch.empty_like(plain)
        plane.read(0, into)
        assert same_values(into, plain)
    decoded = torch.empty_like(plain)
    for piece, target in zip(plane.pieces(), decoded.split(PIECE_ELEMENTS), strict=True):
        codec.decode(piece.clone(), target)
    assert same_values(decoded, plain)


def test_what_has_no_structure_finds_no_room_and_harms_nothing():
    codec, numel = open_codec("lossless4"), 64 * 2048
    memory = torch.zeros(room_bytes(codec.spec, numel, "bf16"), dtype=torch.uint8)
    plane = PackedPlane(numel, torch.bfloat16, codec, memory)
    kept = normal(numel, torch.bfloat16)
    plane.write(0, kept)
    noise = torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16).view(torch.bfloat16)
    with pytest.raises(StorageError, match=r"transport\.weights=raw"):
        plane.write(0, noise)
    into = torch.empty_like(kept)
    plane.read(0, into)
    assert same_values(into, kept)
