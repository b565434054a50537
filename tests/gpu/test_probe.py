"""A whole probe of a GPU, as small as it goes: every part measures something, or says why not."""

import pytest

from devices import DEVICE, needs_accelerator
from outsize.hardware.machine_file import parse
from outsize.probing.run_probe import probe
from probe.efforts import TINY

pytestmark = [
    pytest.mark.cuda,
    needs_accelerator,
]


def test_every_part_of_a_probe_of_a_gpu(tmp_path):
    found = probe(TINY, [tmp_path])
    gpu = found.devices[0]
    assert gpu.device == DEVICE
    assert {link.path for link in gpu.links} == {"pinned", "pageable"}
    assert all(link.fit is not None for link in gpu.links), [link.note for link in gpu.links]
    assert gpu.overlap.both_s.median > 0, gpu.overlap.both_s.source
    assert gpu.feed.source == "host memory"
    assert all(rate.median for rate in gpu.feed.bytes_per_s.values()), gpu.feed.compute_s.source
    assert {"fp32", "bf16", "fp16"} == gpu.matmul_flops_per_s.keys()
    costs = {cost.way: cost for cost in found.host.pinning}
    assert costs["cudaHostRegister"].pin_s_per_gb.median > 0
    # torch rounds 1.25 MiB up to 2 MiB.
    assert costs["torch pin_memory"].taken_bytes.value >= costs["torch pin_memory"].asked_bytes
    assert found.host.adamw_beside_copies_params_per_s.median > 0
    assert len(found.peers) == len(found.devices) * (len(found.devices) - 1)
    assert parse(found.to_json()) == found
