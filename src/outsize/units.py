"""Bytes, rates, seconds and counts as people write them: the one place where 1000 meets 1024.

Sizes of memory are binary (``KiB``, ``MiB``, ``GiB``), rates are decimal (``GB/s``), as data sheets print them.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that ``text`` names, e.g. ``"64MiB"`` → 67108864, ``"24GB"`` → 24 × 10⁹.

    Raises:
        ValueError: not a number followed by a known unit.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    factor = {**_BINARY, **_DECIMAL}.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {text!r}; write a number and a unit, e.g. 64MiB, 20GiB or 24GB")
    return int(float(match[1]) * factor)


def format_bytes(num_bytes: int, *, up: bool = False) -> str:
    """Return ``num_bytes`` in the largest binary unit that keeps it at or above one, e.g. ``"1.50 GiB"``.

    Rounded ``up`` it is a budget that holds them.
    """
    for unit, factor in reversed(_BINARY.items()):
        if abs(num_bytes) >= factor:
            name = unit[0].upper() + "iB"
            rounded = math.ceil(100 * num_bytes / factor) / 100 if up else num_bytes / factor
            return f"{rounded:.2f} {name}"
    return f"{num_bytes} B"


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in decimal units, e.g. ``"2.41 GB/s"``."""
    for name, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.2f} {name}"
    return f"{bytes_per_s:.0f} B/s"


def format_count(count: float) -> str:
    """Return a count as ``"40.4M"`` or ``"8.03B"``."""
    for name, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.3g}{name}"
    return f"{count:g}"


def parse_count(text: str) -> float:
    """Return the count that ``text`` names, e.g. ``"10B"`` → 10¹⁰, ``"2.5M"`` → 2.5 × 10⁶.

    Raises:
        ValueError: not a number, or a number followed by k, M, B or T.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kKmMbBtT]?)\s*", text)
    if match is None:
        raise ValueError(f"not a count: {text!r}; write for example 500M or 10B")
    return float(match[1]) * _COUNTS[match[2].lower()]


def format_seconds(seconds: float) -> str:
    """Return a duration as ``"850 ms"``, ``"12.3 s"`` or ``"2 h 05 min"``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{seconds / 86400:.1f} days"


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is not below ``value``."""
    return -(-value // alignment) * alignment


def without_nan(value: Any) -> Any:
    """Return ``value`` with null for what JSON cannot say: NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value
