"""A step is one or more rounds: whatever their size, losses, gradients and weights are those of one, to the bit."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import ConfigError
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Choice
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import plan
from outsize.training.run import train
from outsize.training.run_dir import as_before
from outsize.training.short_runs import verify
from support import assert_same_end, in_dir, make_batches, make_run
from test_exactness import compare

COUNT = 4
LINK = {"device": "emulated:1"}
FROZEN = ((), ("*layers.0.*",), ("*att*",))


def in_rounds(name: str, directory: Path, round_size: int, count: int = COUNT, **sections: Any) -> Any:
    """Train both ways in rounds, and return the plan, which has as many of them as it takes."""
    own = {"microbatches": count, "round_microbatches": round_size, **sections.pop("train", {})}
    found = compare(name, directory, train=own, batches=make_batches(name, num_sequences=5), **sections).plan
    assert (found.layout.round_size, found.layout.num_rounds) == (round_size, -(-count // round_size))
    return found


@pytest.mark.parametrize("round_size", range(1, COUNT + 1))
@pytest.mark.parametrize("home", ["host", "disk"])
def test_rounds_of_any_size_are_exact(home: str, round_size: int, tmp_path: Path):
    """Uneven last rounds, and microbatches, included."""
    found = in_rounds("llama", tmp_path, round_size, memory={"home": home})
    sums = [op.unit for op in found.program if op.kind is Kind.SUM]
    assert len(sums) == (found.layout.num_rounds - 1) * found.layout.num_streamed


@pytest.mark.parametrize(
    ("name", "round_size", "sections"),
    [
        ("llama_tied", 3, {}),
        ("llama", 1, {"optimizer": {"max_grad_norm": 0.05}, "memory": {"slots": 1}}),
        ("llama", 2, {"optimizer": {"clip": "unit", "max_grad_norm": 0.05}}),
        ("llama", 3, {"optimizer": {"max_grad_norm": 0.0}, "memory": {"home": "disk"}}),
        ("llama", 2, {"model": {"dtype": "bf16"}, "memory": {**LINK, "home": "disk"}}),
        ("llama", 3, {"model": {"dtype": "fp16"}, "memory": LINK}),
        ("llama", 2, {"model": {"freeze": ("model.embed_tokens.*", "model.layers.0.*")}}),
        ("gpt2", 3, {"model": {"freeze": ("*attn*",)}, "memory": {"offload": True}}),
        ("qwen3_moe", 1, {"memory": {**LINK, "activations": "offload"}}),
        ("llama", 2, {"memory": {**LINK, "offload": True}, "transport": {"weights": "lossless4"}}),
        ("llama", 3, {"memory": LINK, "transport": {"activations": "lossless4", "gradients": "lossless4"}}),
        ("llama", 2, {"train": {"loss": "chunked", "head_chunk_tokens": 5}}),
    ],
)
def test_rounds_are_exact_whatever_else_is(name: str, round_size: int, sections: dict, tmp_path: Path):
    if sections.get("optimizer", {}).get("clip") == "unit":
        assert verify(unit_clipped(tmp_path, round_size, sections)).equal
        return
    in_rounds(name, tmp_path, round_size, **sections)


def unit_clipped(directory: Path, round_size: int, sections: dict) -> Any:
    own = {"microbatches": COUNT, "round_microbatches": round_size}
    return make_run(directory, train=own, **sections)


@settings(max_examples=15)
@given(st.data())
def test_any_combination_is_exact(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    draw = data.draw
    count = draw(st.integers(1, 5))
    device = draw(st.sampled_from(["cpu", "emulated:1", "emulated:2", "emulated:4"]))
    several = device[-1] in "24"
    kept = [choice.value for choice in Choice if not several or choice is not Choice.OFFLOAD]
    memory = {
        "home": draw(st.sampled_from(["host", "disk"])),
        "device": device,
        "activations": draw(st.sampled_from(["auto", *kept])),
    }
    if not several:
        memory |= {"offload": draw(st.booleans()), "slots": draw(st.none() | st.integers(1, 4))}
    coded = {} if device == "cpu" else {"activations": "lossless4"}
    coded |= {"weights": "lossless4"} if coded and memory["home"] == "host" else {}
    optimizer = {"max_grad_norm": draw(st.sampled_from([0.0, 0.05]))}
    name = draw(st.sampled_from(["llama", "qwen3_moe", "gpt_neox"]))
    in_rounds(
        name,
        tmp_path_factory.mktemp("run"),
        draw(st.integers(1, count)),
        count,
        memory=memory,
        optimizer=optimizer,
        model={"dtype": draw(st.sampled_from(["fp32", "bf16"])), "freeze": draw(st.sampled_from(FROZEN))},
        transport=draw(st.sampled_from([{}, coded])),
    )


@pytest.mark.parametrize("round_size", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "emulated:2"])
def test_tied_weights_are_summed_use_by_use_in_each_round(device: str, round_size: int, tmp_path: Path):
    own = {"microbatches": 3, "round_microbatches": round_size}
    result = verify(make_run(tmp_path, "llama_tied", train=own, memory={"device": device}))
    assert (result.equal, result.differing) == (True, [])


@pytest.mark.parametrize(
    ("device", "home", "codec"),
    [
        ("emulated:1", "host", "raw"),
        ("emulated:1", "disk", "raw"),
        ("emulated:1", "host", "nf4"),
        ("emulated:2", "disk", "nf4"),
        ("emulated:2", "host", "fp8"),
        ("emulated:2", "host", "raw"),
    ],
)
def test_adapters_are_exact_in_rounds(device: str, home: str, codec: str, tmp_path: Path):
    own = {"method": "lora", "microbatches": 3, "round_microbatches": 1}
    memory = {"device": device, "home": home}
    result = verify(make_run(tmp_path, train=own, lora={"base_codec": codec}, memory=memory))
    assert result.equal, result.differing


@pytest.mark.parametrize("home", ["host", "disk"])
def test_units_with_frozen_weights_that_stay_are_exact(home: str, tmp_path: Path):
    """All of them where there is room, with nothing set aside for slots that they leave; they come up once a step."""

    def planned(**memory: Any) -> Any:
        own = {"method": "lora", "microbatches": 3, "round_microbatches": 2}
        config = make_run(tmp_path, train=own, memory={**LINK, "home": home, **memory})
        assert "slots" in memory or verify(config).equal
        found = prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None).plan
        loads = Counter(op.unit for op in found.program if op.kind is Kind.LOAD)
        assert all(loads[unit] == 1 for unit in found.layout.stays)
        return found

    none, every = planned(slots=2), planned()
    assert not none.layout.stays
    assert len(every.layout.stays) == every.layout.num_streamed
    less = planned(device_memory=every.total_bytes("device") * 5 // 8)
    assert less.layout.stays
    assert every.traffic.up <= less.traffic.up < none.traffic.up


@pytest.mark.parametrize("device", ["emulated:2", "emulated:4"])
@pytest.mark.parametrize("round_size", [1, 2, 3])
def test_several_workers_take_rounds_as_they_are_told(device: str, round_size: int, tmp_path: Path):
    found = in_rounds("llama", tmp_path, round_size, memory={"device": device})
    assert found.layout.stages.round_size == round_size


def test_a_run_goes_on_in_the_rounds_that_it_had(tmp_path: Path):
    own = {"microbatches": 3, "round_microbatches": 2, "steps": 3}
    config = make_run(tmp_path, "llama_tied", train=own)
    train(in_dir(config, tmp_path / "whole"))
    train(in_dir(config, tmp_path / "parts", steps=2))
    unsaid = make_run(tmp_path, "llama_tied", train={"microbatches": None, "steps": 3, "resume": "auto"})
    assert as_before(unsaid, tmp_path / "parts", None).train.round_microbatches == 2
    train(in_dir(unsaid, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_activations_take_the_memory_of_a_round(tmp_path: Path):
    """Whether they stay on the device or leave it, and however many tokens a step has."""

    def taken(count: int, round_size: int, **memory: Any) -> tuple[int, int]:
        own = {"tokens_per_step": None, "microbatches": count, "round_microbatches": round_size}
        config = make_run(tmp_path, train=own, memory={**LINK, "slots": 2, **memory})
        found = prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None).plan
        return found.total_bytes("device"), found.total_bytes("host")

    for memory in (
        {"offload": True, "activations": "recompute"},
        {"activations": "offload"},
        {"offload": False},
    ):
        assert taken(8, 2, **memory) == taken(64, 2, **memory)
        assert sum(taken(8, 2, **memory)) < sum(taken(8, 8, **memory))


def test_what_cannot_go_in_rounds_says_why(tmp_path: Path):
    own = {"microbatches": 2, "round_microbatches": 1}
    with pytest.raises(ConfigError, match="sum gradients at home, in fp32"):
        plan(make_run(tmp_path, train=own, model={"dtype": "bf16"}, optimizer={"gradients": "bf16"}))
