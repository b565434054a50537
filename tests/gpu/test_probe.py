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
    assert {"fp32", "bf16", "fp16"} == gpu.matmul_flops_per_s.keys()
    assert len(found.peers) == len(found.devices) * (len(found.devices) - 1)
    assert parse(found.to_json()) == found
