"""The home of a run whose weights may lie there encoded: in host memory before it is on disk."""

from pathlib import Path
from typing import Any

import pytest

from outsize.errors import InfeasiblePlanError
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from support import make_model_dir, make_run

MIB = 2**20
# Adapters alone train; the rest of the model, most of what lies at home, may rest encoded.
LORA = {"train": {"method": "lora"}, "model": {"dtype": "bf16"}}


def settled(tmp_path: Path, host_bytes: int | None = None, weights: str = "auto", **memory: Any) -> Any:
    """The plan of a run with so much host memory, of a model whose planes are larger than what is rounded up."""
    if not (tmp_path / "model").exists():
        make_model_dir(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    memory = {"device": "emulated", "home": "auto", "disk_memory": "1GiB", **memory}
    memory |= {} if host_bytes is None else {"host_memory": host_bytes}
    config = make_run(tmp_path, memory=memory, transport={"weights": weights}, **LORA)
    return prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None).plan


def test_what_fits_as_it_is_stays_as_it_is(tmp_path: Path):
    plan = settled(tmp_path)
    assert (plan.home, plan.transport.weights) == ("host", "raw")


def test_what_would_be_on_disk_is_kept_in_memory_encoded(tmp_path: Path):
    whole = settled(tmp_path).total_bytes("host")
    codecs = ("lossless4", "lossless3")
    needs = [settled(tmp_path, weights=codec).total_bytes("host") for codec in codecs]
    assert needs[1] < needs[0] < whole
    for host_bytes, codec in zip(needs, codecs, strict=True):
        plan = settled(tmp_path, host_bytes)
        assert (plan.home, plan.transport.weights) == ("host", codec)
        assert plan.total_bytes("host") <= host_bytes
    assert settled(tmp_path, needs[0], weights="lossless4").home == "host"
    assert settled(tmp_path, needs[1] - 1).home == "disk"


@pytest.mark.parametrize("wanted", [{"weights": "raw"}, {"home": "disk"}, {"device": "cpu"}])
def test_nobody_who_did_not_ask_gets_a_codec(wanted: dict[str, Any], tmp_path: Path):
    host_bytes = settled(tmp_path, home="host", weights="lossless4").total_bytes("host")
    plan = settled(tmp_path, host_bytes, **wanted)
    assert (plan.home, plan.transport.weights) == ("disk", "raw")


def test_a_home_that_has_to_be_in_memory_says_what_it_lacks(tmp_path: Path):
    with pytest.raises(InfeasiblePlanError) as raised:
        settled(tmp_path, 2**16, home="host")
    assert raised.value.short_by["host"] > 0
