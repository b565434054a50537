"""Which devices hand over to each other by themselves, and what a run says where they cannot."""

from typing import Any

import pytest

from outsize.accelerators import Devices
from outsize.config import Config
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.session.decide.rates import measure_rates
from outsize.session.job import machine as module
from outsize.session.job.machine import measured_peers, peers_of
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from support import make_run

RING = frozenset({(0, 1), (1, 2), (2, 0)})


def configured(**sections: dict[str, Any]) -> Config:
    return Config(model={"path": "m"}, data={"path": "d"}, train={"run_dir": "r"}, **sections)


def pairs_of(config: Config, device: str) -> Any:
    rate, activations = config.memory.peer_gb_per_s, config.transport.activations
    return peers_of(config.parallel.handover, activations, rate, Devices.parse(device))


def test_emulated_devices_copy_where_a_rate_says_how_fast():
    with_rate = configured(memory={"peer_gb_per_s": 2.0})
    assert pairs_of(configured(), "emulated:3") == frozenset()
    assert pairs_of(with_rate, "emulated:3") == RING
    assert pairs_of(with_rate, "emulated:1") == frozenset()
    host = configured(memory={"peer_gb_per_s": 2.0}, parallel={"handover": "host"})
    assert pairs_of(host, "emulated:3") == frozenset()
    rates = measured_peers(2.0, Devices.parse("emulated:3"), RING)
    assert [(peer.source, peer.target, peer.bytes_per_s.value) for peer in rates] == [
        (0, 1, 2e9),
        (1, 2, 2e9),
        (2, 0, 2e9),
    ]


def test_gpus_copy_where_they_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        module, "can_copy", lambda source, target: {str(source), str(target)} != {"cuda:1", "cuda:4"}
    )
    assert pairs_of(configured(), "cuda:0,1,4") == RING - {(1, 2)}
    with pytest.raises(ConfigError, match="cuda:1 does not copy to cuda:4 by itself; see outsize doctor"):
        pairs_of(configured(parallel={"handover": "peer"}), "cuda:0,1,4")


def test_handing_over_between_devices_that_cannot_is_refused():
    asked = {"handover": "peer"}
    with pytest.raises(ConfigError, match=r"set memory\.peer_gb_per_s, or use parallel\.handover=auto"):
        pairs_of(configured(parallel=asked), "emulated:2")


def test_inputs_that_are_rounded_on_their_way_below_go_that_way():
    sections = {"memory": {"peer_gb_per_s": 1.0}, "transport": {"activations": "int8"}}
    assert pairs_of(configured(**sections), "emulated:2") == frozenset()
    with pytest.raises(ConfigError, match="int8 has rounded"):
        pairs_of(configured(**sections, parallel={"handover": "peer"}), "emulated:2")


def test_what_arrives_has_to_have_room_or_goes_by_way_of_host_memory(tmp_path):
    """Where it has none, copies are timed all the same: another plan, with a codec, may have room."""

    def prepared(handover: str, device_bytes: int | None = None) -> Any:
        memory: dict[str, Any] = {"device": "emulated:2", "peer_gb_per_s": 1.0}
        memory |= {} if device_bytes is None else {"device_memory": device_bytes}
        sections = {"parallel": {"handover": handover}, "train": {"microbatches": 4}}
        return prepare(
            RunSpec.of(make_run(tmp_path, memory=memory, **sections), tmp_path / "run"), lambda _: None
        )

    def planned(*arguments: Any) -> Any:
        return prepared(*arguments).plan

    with pytest.raises(InfeasiblePlanError) as raised:
        planned("host", 1)
    least = 1 + raised.value.short_by["device"]
    assert planned("auto", least).layout.peers == frozenset()
    with pytest.raises(
        InfeasiblePlanError, match="needs room for what arrives of a round of 1 on each device"
    ):
        planned("peer", least)
    assert planned("peer").layout.peers == planned("auto").layout.peers == {(0, 1), (1, 0)}
    rates = measure_rates(prepared("auto", least), tmp_path / "run")
    assert {(peer.source, peer.target) for peer in rates.machine.peers} == {(0, 1), (1, 0)}
