from dataclasses import replace

from outsize.probing.effort import QUICK

MIB = 2**20
TINY = replace(
    QUICK,
    sample_s=0.0,
    num_samples_min=2,
    array_bytes=MIB,
    plane_bytes=MIB,
    disk_bytes=64 * MIB,
    disk_s=0.0,
    queue_depths=(1, 4),
    copy_bytes_max=MIB,
    num_copy_rounds=9,
    copy_s=0.0,
    matmul_s=0.0,
    overlap_s=0.0,
    peer_bytes=MIB,
    data_chars=2_000,
    loader_tokens=2**17,
    limit_s=1e9,
)
