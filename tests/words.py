"""Layouts of the window encoding, and words to encode."""

import numpy as np

from outsize.codecs.window_layout import WindowLayout

LAYOUTS = [
    WindowLayout(mantissa, code)
    for mantissa, code in ((7, 4), (7, 3), (7, 5), (7, 6), (7, 7), (10, 3), (10, 4))
]


def near(numel, seed=0, *, layout=LAYOUTS[0], odd=0.01):
    """Words whose exponents are near each other, but for some that are anything."""
    random = np.random.default_rng(seed)
    exponents = random.integers(9, 9 + (1 << layout.code_bits) // 2, numel, dtype=np.uint16)
    words = exponents << layout.mantissa_bits
    words |= random.integers(0, 1 << layout.mantissa_bits, numel, dtype=np.uint16)
    words |= random.integers(0, 2, numel, dtype=np.uint16) << 15
    anything = random.random(numel) < odd
    return np.where(anything, random.integers(0, 2**16, numel, dtype=np.uint16), words)
