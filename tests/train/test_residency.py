from pathlib import Path

import pytest

from outsize.config import Config
from outsize.errors import InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.session.job.home_choice import settle_home
from outsize.session.job.machine import describe_machine

MIB = 2**20
# 64 MiB of bf16 that do not train: 48.2 MiB as lossless4, 45.1 as lossless3, and 2 % of room.
MODEL = ModelSpec(
    units=tuple(pack_unit(i, f"u{i}", "block", [("w", (8 * MIB,), False, False)]) for i in range(4)),
    dtype="bf16",
)
STATE = 64 * MIB


def settle(tmp_path: Path, host_mib: int, needs_mib=None, **wanted):
    """Codec and home of the run that is settled on, and what was tried; ``needs_mib`` is what plans ask of the host."""
    home, weights = wanted.get("home", "auto"), wanted.get("weights", "auto")
    memory = {
        "device": wanted.get("device", "emulated"),
        "home": home,
        "device_memory": "1GiB",
        "host_memory": f"{host_mib}MiB",
        "disk_memory": "1GiB",
    }
    config = Config(
        model={"path": "m"},
        data={"path": "d", "seq_len": 8},
        train={"steps": 1, "tokens_per_step": 8},
        memory=memory,
        transport={"weights": weights},
    )
    tried = []

    def plan(run, machine):
        codec = run.transport.weights
        tried.append((codec, machine.home))
        needed = (needs_mib or {}).get("raw" if codec == "auto" else codec, 0)
        if machine.home == "host" and needed > host_mib:
            raise InfeasiblePlanError(codec, {"host": needed})
        return codec

    machine = describe_machine(config.memory, STATE, tmp_path)
    where, codec = settle_home(config, MODEL, machine, STATE, tmp_path, plan)
    assert (where.device_bytes, where.host_bytes) == (2**30, host_mib * MIB)
    return codec, where.home, tried


def test_what_fits_as_it_is_stays_as_it_is(tmp_path: Path):
    assert settle(tmp_path, 80) == ("auto", "host", [("auto", "host")])


def test_what_would_be_on_disk_is_kept_in_memory_encoded(tmp_path: Path):
    assert settle(tmp_path, 60)[:2] == ("lossless4", "host")
    assert settle(tmp_path, 48)[:2] == ("lossless3", "host")
    assert settle(tmp_path, 40) == ("auto", "disk", [("auto", "disk")])


def test_so_is_what_is_named(tmp_path: Path):
    assert settle(tmp_path, 60, weights="lossless3")[:2] == ("lossless3", "host")
    assert settle(tmp_path, 80, weights="lossless3")[2] == [("lossless3", "host")]


def test_nobody_who_did_not_ask_gets_a_codec(tmp_path: Path):
    assert settle(tmp_path, 60, weights="raw") == ("raw", "disk", [("raw", "disk")])
    assert settle(tmp_path, 60, home="disk")[:2] == ("auto", "disk")
    assert settle(tmp_path, 60, device="cpu")[:2] == ("auto", "disk")


def test_what_else_a_run_needs_counts(tmp_path: Path):
    """The state fits, and not the plan; or one encoding leaves too little for it, and another enough; or none does."""
    found = settle(tmp_path, 70, {"raw": 90, "lossless4": 75, "lossless3": 65})
    assert found[:2] == ("lossless3", "host")
    assert found[2] == [("auto", "host"), ("lossless4", "host"), ("lossless3", "host")]
    found = settle(tmp_path, 60, {"lossless4": 75, "lossless3": 65})
    assert found[:2] == ("auto", "disk")
    with pytest.raises(InfeasiblePlanError, match="auto"):
        settle(tmp_path, 70, {"raw": 90, "lossless4": 75, "lossless3": 75})
