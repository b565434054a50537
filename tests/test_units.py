import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.units import (
    align_up,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64MiB", 64 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("512", 512),
        ("512 B", 512),
        (" 2 TiB ", 2**41),
        (4096, 4096),
    ],
)
def test_sizes_are_binary_with_an_i_and_decimal_without(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "ten GB", "5 XB", "-5MiB", "1e9", "5 Mi B"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write a number and a unit"):
        parse_bytes(text)


@given(st.integers(min_value=1, max_value=2**50))
def test_a_printed_size_is_within_half_a_percent_of_what_it_stands_for(num_bytes):
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.005 * num_bytes
    budget = parse_bytes(format_bytes(num_bytes, up=True))
    assert num_bytes - 1 <= budget <= 1.01 * num_bytes + 1


@given(st.integers(min_value=0, max_value=2**60), st.sampled_from([1, 64, 512, 2048, 4096, 3]))
def test_align_up_gives_the_next_multiple(value, alignment):
    aligned = align_up(value, alignment)
    assert aligned % alignment == 0
    assert value <= aligned < value + alignment


def test_sizes_print_in_binary_units_and_rates_in_decimal_ones():
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(-3 * 2**30) == "-3.00 GiB"
    assert format_rate(2.41e9) == "2.41 GB/s"
    assert format_rate(999) == "999 B/s"


def test_counts_and_durations_print_as_people_say_them():
    assert format_count(40_400_000) == "40.4M"
    assert format_count(8.03e9) == "8.03B"
    assert format_count(12) == "12"
    assert format_seconds(0.85) == "850 ms"
    assert format_seconds(12.34) == "12.3 s"
    assert format_seconds(125) == "2 min 05 s"
    assert format_seconds(7500) == "2 h 05 min"
    assert format_seconds(6.34 * 86400) == "6.3 days"


def test_counts_are_read_as_people_write_them():
    assert parse_count("10B") == 1e10
    assert parse_count(" 2.5m ") == 2.5e6
    assert parse_count("1e9") == 1e9
    assert parse_count("0") == 0
    for text in ("", "ten", "-1", "1.2.3", "10GB"):
        with pytest.raises(ValueError, match="not a count"):
            parse_count(text)
