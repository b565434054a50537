"""Strategies that make bad input of good: documents with other values in them, bytes with holes."""

import copy
from typing import Any

from hypothesis import strategies as st

SIZES = st.sampled_from([-1, 0, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    SIZES,
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["../../etc/passwd", "/etc/passwd", "..", "", ".", "a/b", "\x00", "~", "-1", "1e400", "F32"]
    ),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document, from the outside in."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@st.composite
def documents(draw: st.DrawFn, good: Any) -> Any:
    """``good`` with one to three places changed: another value, gone, or under another name."""
    changed = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        *outer, last = draw(st.sampled_from(places(changed))) or (None,)
        if last is None:
            return draw(JUNK)
        inside = changed
        for key in outer:
            inside = inside[key]
        how = draw(st.sampled_from(["replace", "replace", "remove", "rename"]))
        value = inside.pop(last) if how != "replace" else draw(JUNK)
        if how == "replace":
            inside[last] = value
        elif how == "rename" and isinstance(inside, dict):
            inside[draw(st.text(max_size=8))] = value
    return changed


@st.composite
def holes(draw: st.DrawFn, good: bytes) -> bytes:
    """``good`` with a few stretches cut out, changed or put in, or its beginning alone."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from([0, 1, 1, 2, 8, 64]))
        data[at : at + length] = draw(st.binary(max_size=12))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def texts(good: str) -> st.SearchStrategy[str]:
    """Text that is nearly ``good``, or anything."""
    return holes(good.encode()).map(lambda data: data.decode("utf-8", "replace")) | st.text(max_size=60)
