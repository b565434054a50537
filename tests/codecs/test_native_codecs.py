"""The kernels in C write the bytes that NumPy and torch write, at every level of instructions, and read them alike."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.device_contract import encode, normal
from outsize import native
from outsize.codecs import blockwise, frozen, window_layout
from outsize.codecs.codec import open_codec
from outsize.codecs.codec_spec import BLOCKWISE
from outsize.codecs.window import decode_window, encode_window, join_halves, split_halves
from outsize.codecs.window_layout import BLOCK_ELEMENTS
from threads import num_threads
from words import LAYOUTS, near

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))
NAMES = [*(spec.name for spec in BLOCKWISE), "nf4", "nf4-double"]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(params=native.library.LEVELS, autouse=True)
def level(request):
    """Each instruction set that the processor has; others are those below them."""
    if native.available() and native.use_level(request.param) != request.param:
        pytest.skip("not on this processor")
    yield
    if native.available():
        native.use_level(native.library.LEVELS[-1])


def by_torch(codec, source, monkeypatch):
    """Encoding and decoded elements of the torch form."""
    with monkeypatch.context() as patch:
        for module in (blockwise, frozen):
            patch.setattr(module, "native_serves", lambda *_: False)
        encoded = encode(codec, source)
        decoded = torch.empty_like(source)
        codec.decode(encoded, decoded)
    return encoded, decoded


def assert_like_torch(codec, source, monkeypatch):
    encoded, decoded = by_torch(codec, source, monkeypatch)
    assert torch.equal(encode(codec, source, fill=255), encoded)
    into = torch.full_like(source, 7.0)
    codec.decode(encoded, into)
    # A NaN is a NaN: torch itself writes other bits of it in the last elements of a tensor than in those before.
    assert torch.equal(into.isnan(), decoded.isnan())
    assert torch.equal(bits(into.nan_to_num(0.0)), bits(decoded.nan_to_num(0.0)))


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_blockwise_bytes_are_those_of_torch(name, dtype, monkeypatch):
    """Whole pieces and parts of groups; zeros of either sign; what is tiny, huge or not finite; every pattern."""
    codec = open_codec(name).seeded(11)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    zeros = torch.tensor([0.0, -0.0], dtype=dtype).repeat(333)
    for source in (every, shuffled, zeros, *(normal(n, dtype) for n in (1, 63, 64, 129, 2**18 + 777))):
        assert_like_torch(codec, source, monkeypatch)


@settings(max_examples=60)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(DTYPES),
    st.integers(1, 400),
    st.integers(0, 2**32 - 1),
    st.floats(-1e38, 1e38),
    st.floats(1e-45, 3e38),
)
def test_blockwise_bytes_are_those_of_torch_for_whatever_there_is(name, dtype, numel, seed, centre, spread):
    source = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert_like_torch(open_codec(name).seeded(seed), (source * spread + centre).to(dtype), monkeypatch)


def assert_like_numpy(layout, words):
    want, got = np.zeros(2 * words.size, np.uint8), np.full(2 * words.size + 8, 77, np.uint8)
    size = window_layout.encode_window(layout, words, want)
    assert encode_window(layout, words, got[:-8]) == size
    assert got[:size].tobytes() == want[:size].tobytes()
    assert (got[-8:] == 77).all()
    into = np.zeros_like(words)
    decode_window(layout, got[:size], into)
    assert np.array_equal(into, words)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_window_bytes_are_those_of_numpy(layout):
    every = np.arange(2**16, dtype=np.uint16)
    np.random.default_rng(0).shuffle(every)
    for words in (every, np.sort(every), np.zeros(5000, np.uint16)):
        assert_like_numpy(layout, words)
    for numel in (640, 1000, BLOCK_ELEMENTS, 3 * BLOCK_ELEMENTS + 5003):
        assert_like_numpy(layout, near(numel, numel, layout=layout))


@settings(max_examples=60)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 5000),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.001, 0.05, 0.2, 0.5, 1.0]),
)
def test_window_bytes_are_those_of_numpy_for_any_words(layout, numel, seed, odd):
    assert_like_numpy(layout, near(numel, seed, layout=layout, odd=odd))


def test_halves_of_words():
    words = np.random.default_rng(0).integers(0, 2**32, 1003, dtype=np.uint32)
    lower, into = np.zeros(1003, np.uint16), np.zeros_like(words)
    upper = split_halves(words, lower)
    assert np.array_equal(upper.astype(np.uint32) << 16 | lower, words)
    join_halves(lower, upper, into)
    assert np.array_equal(into, words)


def test_what_lies_at_an_odd_address_is_left_to_numpy():
    words = near(3000)
    want = np.zeros(2 * words.size, np.uint8)
    size = window_layout.encode_window(LAYOUTS[0], words, want)
    odd = np.zeros(2 * words.size + 1, np.uint8)[1:]
    assert encode_window(LAYOUTS[0], words, odd) == size
    assert odd[:size].tobytes() == want[:size].tobytes()


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("int8", ["blockwise_encode", "blockwise_decode"]),
        ("int4-stochastic", ["blockwise_encode", "blockwise_decode"]),
        ("nf4-double", ["nf4_encode", "nf4_decode"]),
        ("lossless3", ["halves", "window_encode", "window_decode", "whole"]),
    ],
)
def test_codecs_use_the_kernels_that_there_are(name, kernels, monkeypatch):
    called, call = [], native.call
    monkeypatch.setattr(native, "call", lambda kernel, *rest: called.append(kernel) or call(kernel, *rest))
    codec, source = open_codec(name), normal(5000, torch.float32)
    codec.decode(encode(codec, source), torch.empty_like(source))
    assert called == kernels


@pytest.mark.parametrize("name", ["int8-stochastic", "int4-asymmetric"])
def test_threads_share_pieces(name, monkeypatch):
    """Three of them, of which one gets a piece that is not whole: the bytes are those of one."""
    codec, source = open_codec(name).seeded(3), normal(2 * 2**18 + 777, torch.bfloat16)
    with num_threads(3):
        assert_like_torch(codec, source, monkeypatch)
