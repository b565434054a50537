"""The lossless window codec: every word comes back, in NumPy and in torch, and the layout is a permutation of bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import CodecContract
from contracts.device_contract import encode, normal
from outsize.codecs.codec import open_codec
from outsize.codecs.codec_spec import LOSSLESS3, LOSSLESS4
from outsize.codecs.window import decode_window_torch
from outsize.codecs.window_layout import (
    BLOCK_ELEMENTS,
    MANTISSA_BITS,
    WindowLayout,
    WindowSections,
    decode_window,
    encode_window,
)
from outsize.errors import CodecError
from words import LAYOUTS, near


class TestLossless4(CodecContract):
    def make(self):
        return open_codec("lossless4")


class TestLossless3(CodecContract):
    def make(self):
        return open_codec("lossless3")


def encoded_of(layout, words):
    room = np.zeros(2 * words.size, np.uint8)
    return room[: encode_window(layout, words, room)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pieces_carry_every_bit_of_every_guest_once(layout):
    """Each host's hole is full, and what it carries is each bit of a guest that is not in the hole."""
    carried = dict.fromkeys(range(layout.num_hosts), 0)
    guests = dict.fromkeys(range(layout.num_guests), 0)
    for piece in layout.pieces:
        for guest, host in enumerate(range(*piece.hosts)):
            assert not carried[host] & piece.mask
            carried[host] |= piece.mask
            moved = piece.mask << piece.shift if piece.shift >= 0 else piece.mask >> -piece.shift
            assert moved.bit_count() == piece.mask.bit_count()
            assert not guests[guest] & moved
            guests[guest] |= moved
    for guest, bit in enumerate(layout.signs):
        carried[layout.num_hosts - 1] |= 1 << bit
        guests[guest] |= 1 << 15
    low = (1 << layout.hole_shift) - 1
    assert set(carried.values()) == {layout.hole}
    # Guests are packed in order of their bits below the hole, which lies above the code.
    assert set(guests.values()) == {0x8000 | low}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_torch_decodes_what_numpy_encodes(layout):
    for numel in (640, 1000, BLOCK_ELEMENTS, 3 * BLOCK_ELEMENTS + 5003, 20 * BLOCK_ELEMENTS):
        words = near(numel, numel, layout=layout)
        encoded = encoded_of(layout, words)
        assert encoded.size < words.nbytes
        into = np.zeros_like(words)
        decode_window(layout, encoded, into)
        assert np.array_equal(into, words)
        by_torch = decode_window_torch(layout, torch.from_numpy(encoded), numel)
        assert np.array_equal(by_torch.numpy().view(np.uint16), words)


@settings(max_examples=60)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(0, 5000),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
)
def test_any_words_come_back(layout, numel, seed, odd):
    words = near(numel, seed, layout=layout, odd=odd)
    encoded = encoded_of(layout, words)
    assert encoded.size <= words.nbytes
    into = np.zeros_like(words)
    decode_window(layout, encoded, into)
    assert np.array_equal(into, words)
    if numel:
        by_torch = decode_window_torch(layout, torch.from_numpy(encoded), numel)
        assert np.array_equal(by_torch.numpy().view(np.uint16), words)


@pytest.mark.parametrize(("spec", "most"), [(LOSSLESS4, 0.76), (LOSSLESS3, 0.71)], ids=["4 bits", "3 bits"])
@pytest.mark.parametrize("scale", [1.0, 1.4, 1.9])
def test_normal_weights_take_what_the_facts_say(spec, most, scale):
    """Whatever the deviation: where binades fall on the bell differs."""
    source = (normal(2**18, torch.float32) * scale).bfloat16()
    ratio = encode(open_codec(spec.name), source).numel() / source.nbytes
    assert ratio <= most
    assert ratio == pytest.approx(spec.expected_bytes(2**20, "bf16") / 2**21, abs=0.01)


def test_halves_take_14_bits_and_singles_keep_their_lower_half():
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        source = normal(2**18, dtype)
        ratio = encode(open_codec("lossless4"), source).numel() / source.nbytes
        assert ratio == pytest.approx(
            LOSSLESS4.expected_bytes(2**20, name) / 2**20 / source.itemsize, abs=0.01
        )


def test_what_has_no_structure_is_kept_as_it_is():
    words = np.random.default_rng(0).integers(0, 2**16, 50_000, dtype=np.uint16)
    encoded = encoded_of(LAYOUTS[0], words)
    assert encoded.tobytes() == words.tobytes()


def test_zeros_between_blocks_of_weights_cost_nothing():
    """A bias that is all zeros has a window of its own."""
    words = np.concatenate([near(BLOCK_ELEMENTS, odd=0), np.zeros(BLOCK_ELEMENTS, np.uint16)])
    assert encoded_of(LAYOUTS[0], words).size == WindowSections(LAYOUTS[0], words.size).num_bytes(0)


def test_bytes_that_are_no_encoding_are_refused():
    codec = open_codec("lossless4")
    source = normal(40_000, torch.bfloat16)
    encoded = encode(codec, source)
    into = torch.empty_like(source)
    for damaged in (encoded[:-1], encoded[:-2], encoded[:5000]):
        with pytest.raises(CodecError, match="no lossless4 encoding of 40000 elements"):
            codec.decode(damaged.clone(), into)
    outside = encoded.clone()
    sections = WindowSections(WindowLayout(MANTISSA_BITS["bf16"], 4), 40_000)
    listed = outside[2 * sections.exceptions_start : -sections.num_bases].view(torch.int16)
    listed[-1] |= 2047
    with pytest.raises(CodecError, match="listed at"):
        codec.decode(outside, into)
