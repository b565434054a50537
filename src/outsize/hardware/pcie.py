"""PCIe in numbers: what one lane carries by generation, and what is left of it in copies."""

from typing import Final

# Bytes per second of one lane and direction by PCIe generation, line coding taken off: transfers per second times
# 8/10 for generations 1 and 2, 128/130 for 3 to 5; 6 sends flits with 236 bytes of payload in 256.
LANE_BYTES_PER_S: Final = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.375e9}
# Headers of packets leave 80 to 87 % for large copies: 25 of 31.5 GB/s and 55 of 63 are reported of sound machines.
SOUND_SHARE: Final = 0.8


def theory_bytes_per_s(generation: int, lanes: int) -> float:
    """Return what a link carries per direction.

    Raises:
        ValueError: a generation of unknown rate, or no lanes.
    """
    if generation not in LANE_BYTES_PER_S or lanes < 1:
        raise ValueError(f"no rate is known of PCIe generation {generation} with {lanes} lanes")
    return LANE_BYTES_PER_S[generation] * lanes
