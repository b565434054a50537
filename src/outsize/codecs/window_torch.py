"""The lossless window encoding decoded by torch, on whatever device it lies: see `window_layout`.

Nothing here waits for the device: what must be known beforehand follows from the length of the encoding. Under
``torch.compile`` the masks and shifts become one kernel.
"""

import torch
from torch import Tensor

from outsize.codecs.window_layout import (
    BLOCK_ELEMENTS,
    POSITION_BITS,
    ROWS,
    SPAN_ELEMENTS,
    WindowLayout,
    WindowSections,
)


def decode_window_torch(layout: WindowLayout, encoded: Tensor, numel: int) -> Tensor:
    """Return the words of an encoding, int16 ``[numel]``.

    Raises:
        ValueError: the lengths do not fit each other.
    """
    if encoded.numel() == 2 * numel:
        return encoded.view(torch.int16)
    sections = WindowSections(layout, numel)
    num_exceptions = sections.num_exceptions(encoded.numel())
    if not 0 <= num_exceptions <= numel:
        raise ValueError(f"{encoded.numel()} bytes hold no {numel} elements")
    words = encoded[: sections.num_bytes(num_exceptions) - sections.num_bases].view(torch.int16)
    bases = encoded[-sections.num_bases :].to(torch.int16) << layout.mantissa_bits
    hosts = layout.num_hosts
    rows = words[: sections.tail_start].view(-1, hosts, BLOCK_ELEMENTS // ROWS)
    parts = [unpack(layout, rows, bases[: sections.num_blocks]).view(-1)]
    if sections.tail:
        tail_rows = words[sections.tail_start : sections.left_over_start].view(1, hosts, -1)
        parts.append(unpack(layout, tail_rows, bases[sections.num_blocks :]).view(-1))
    parts.append(words[sections.left_over_start : sections.counts_start])
    elements = torch.cat(parts)
    counts = words[sections.counts_start : sections.exceptions_start].to(torch.int64)
    listed = words[sections.exceptions_start :]
    spans = torch.arange(0, numel - sections.left_over, SPAN_ELEMENTS, device=encoded.device)
    positions = torch.repeat_interleave(spans, counts, output_size=num_exceptions)
    positions += listed & (SPAN_ELEMENTS - 1)
    # An int16 shifts right with its sign; what was the sign of a hole's top bit is masked off.
    holes = (listed >> POSITION_BITS) & ((1 << layout.num_guests) - 1)
    return elements.index_add_(0, positions, holes << layout.hole_shift)


def unpack(layout: WindowLayout, rows: Tensor, bases: Tensor) -> Tensor:
    """Return blocks, int16 ``[m, 16, columns]``, of ``rows``, int16 ``[m, hosts, columns]``, exceptions aside.

    Args:
        layout: of the words.
        rows: as stored.
        bases: int16 ``[m]``, shifted to the exponent's place.
    """
    pieces = layout.pieces
    guests = _shift(rows[:, pieces[0].hosts[0] : pieces[0].hosts[1]] & pieces[0].mask, pieces[0].shift)
    for piece in pieces[1:]:
        guests = guests | _shift(rows[:, piece.hosts[0] : piece.hosts[1]] & piece.mask, piece.shift)
    if layout.signs:
        last = rows[:, -1]
        signs = [(last & (1 << bit)) << (15 - bit) for bit in layout.signs]
        guests = guests | torch.stack(signs, dim=1)
    return torch.cat([rows & ~layout.hole, guests], dim=1) + bases[:, None, None]


def _shift(words: Tensor, shift: int) -> Tensor:
    """Left where positive; ``words`` have no sign, so a shift to the right brings in zeros."""
    return words << shift if shift >= 0 else words >> -shift
