"""What platforms allow to be pinned, read off trees of files that stand for them."""

import pytest

from hardware.fake_machine import CGROUP_V1, CGROUP_V2, SERVER, build
from outsize.accelerators import VENDORS, Devices, Vendor
from outsize.hardware.host_memory import refused_pin
from outsize.probing.link import why_pageable

LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {0}  {0}  bytes\n"
UNLIMITED = {**SERVER, "proc/self/limits": LIMITS.format("unlimited")}
WSL = {"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"}


@pytest.mark.parametrize(
    ("trees", "told", "tries"),
    [
        ((UNLIMITED,), "nothing limits it here", "free RAM may be short"),
        ((SERVER,), "at most 64.00 KiB may be locked (ulimit -l)", "ulimit -l unlimited"),
        ((SERVER, {".dockerenv": ""}), "at most 64.00 KiB", "start the container with --ulimit memlock=-1"),
        ((UNLIMITED, CGROUP_V2), "the control group allows 512.00 MiB more", "docker run --memory"),
        ((UNLIMITED, CGROUP_V1), "the control group allows 512.00 MiB more", "docker run --memory"),
        ((UNLIMITED, WSL), "under WSL2 the driver pins part of RAM only", "[wsl2] of .wslconfig"),
    ],
    ids=["nothing", "ulimit", "container", "group", "older group", "WSL2"],
)
def test_what_may_have_kept_a_driver_from_pinning(trees, told, tries, tmp_path):
    why = refused_pin(build(tmp_path, *trees))
    assert why.startswith("the driver refused to pin memory")
    assert told in why
    assert tries in why


def test_limits_that_are_not_there_are_not_told(tmp_path):
    why = refused_pin(build(tmp_path, UNLIMITED, WSL))
    assert "ulimit" not in why
    assert "control group" not in why


def test_where_torch_has_no_way_to_pin_no_limit_is_blamed(monkeypatch):
    monkeypatch.setitem(VENDORS, "other", Vendor(title="Other"))
    assert why_pageable(Devices("other", (0,))) == "torch pins no memory that it has not allocated for Other"
