"""PCIe in numbers: what one lane carries by generation, and what is left of it in copies."""

from typing import Final

# Transfers per second of one lane by generation, and the share that line coding leaves of the bits: 8 of 10 for
# generations 1 and 2, 128 of 130 for 3 to 5; 6 sends flits with 236 bytes of payload in 256.
_TRANSFERS_PER_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
_CODING = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 236 / 256}
# Bytes per second of one lane and direction, from the base specifications.
LANE_BYTES_PER_S: Final = {
    generation: transfers * _CODING[generation] / 8 for generation, transfers in _TRANSFERS_PER_S.items()
}
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
