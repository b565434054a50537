"""The equality tests on a GPU: deterministic kernels, host and disk homes, activations kept and sent away.

The resident reference computes on the same GPU and steps the same fp32 masters in host memory. To try the tests
themselves where there is no GPU: ``OUTSIZE_TEST_DEVICE=emulated:1 pytest tests/gpu``.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from devices import DEVICE, ON_ACCELERATOR, needs_accelerator
from outsize.accelerators import is_accelerator
from outsize.errors import ConfigError
from outsize.planner.program.stages import Choice
from outsize.session.job.prepare import prepare
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import make_model_dir, make_run

pytestmark = [
    pytest.mark.cuda,
    needs_accelerator,
    # Operations without a deterministic kernel warn; whether that matters is what the tests find out.
    pytest.mark.filterwarnings("default"),
]
# Biases, experts, soft caps and windows, learned positions, ALiBi, sinks, latent attention.
FAMILIES = ("qwen2", "qwen3_moe", "gemma2", "mistral", "gpt2", "bloom", "gpt_oss", "deepseek_v3")


def run_on_device(directory: Path, name: str = "llama", **sections: dict[str, Any]) -> Any:
    memory = {"device": DEVICE, "home": "host", **sections.pop("memory", {})}
    return make_run(directory, name, memory=memory, **sections)


def assert_equal(result: Any) -> None:
    assert result.loss_streamed == result.loss_resident
    assert result.differing == []
    assert result.equal


@pytest.mark.parametrize("offload", [False, True], ids=["kept", "offloaded"])
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_streamed_is_resident_bit_for_bit(dtype: str, home: str, offload: bool, tmp_path: Path):
    memory = {"home": home, "offload": offload, "slots": 2}
    assert_equal(verify(run_on_device(tmp_path, model={"dtype": dtype}, memory=memory)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_other_families(name: str, dtype: str, tmp_path: Path):
    make_model_dir(tmp_path / "model", name, tie_word_embeddings=False)
    assert_equal(verify(run_on_device(tmp_path, name, model={"dtype": dtype})))


@pytest.mark.parametrize("activations", ["auto", "keep-products"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3"])
def test_kernels_of_liger(name: str, activations: str, tmp_path: Path):
    pytest.importorskip("liger_kernel")
    sections = {"model": {"dtype": "bf16", "kernels": "liger"}, "memory": {"activations": activations}}
    assert_equal(verify(run_on_device(tmp_path, name, **sections)))


@pytest.mark.parametrize("compiled", ["off", "blocks"])
@pytest.mark.parametrize("products", ["fp8", "fp8-rowwise"])
def test_products_in_eight_bits(products: str, compiled: str, tmp_path: Path):
    """Of 24 tokens, which is no multiple of 16, in a microbatch of two."""
    pytest.importorskip("torchao")
    model = {"dtype": "bf16", "products": products, "compile": compiled}
    data, train = {"seq_len": 12}, {"tokens_per_step": 48}
    try:
        assert_equal(verify(run_on_device(tmp_path, model=model, data=data, train=train)))
    except ConfigError as error:
        pytest.skip(str(error))


def test_tied_weights_leave_room_for_rounding(tmp_path: Path):
    """Their gradient is a sum over units and microbatches, and streaming takes it unit by unit."""
    result = verify(run_on_device(tmp_path, "llama_tied"))
    assert result.loss_streamed == pytest.approx(result.loss_resident, abs=1e-6)
    assert result.max_weight_difference < 1e-4  # of rates of 1e-3: AdamW's first steps are signs


@pytest.mark.parametrize("slots", [1, 3, None])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_slots_and_microbatches(microbatches: int, slots: int | None, tmp_path: Path):
    sections = {"train": {"microbatches": microbatches}, "memory": {"slots": slots, "offload": True}}
    assert_equal(verify(run_on_device(tmp_path, model={"dtype": "bf16"}, **sections)))


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("activations", [choice.value for choice in Choice])
def test_whatever_becomes_of_activations(activations: str, home: str, tmp_path: Path):
    memory = {"home": home, "activations": activations}
    assert_equal(verify(run_on_device(tmp_path, model={"dtype": "bf16"}, memory=memory)))


@pytest.mark.parametrize("clip", ["global", "unit", "none"])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_split_masters_step_like_separate_ones(home: str, clip: str, tmp_path: Path):
    sections = {"memory": {"home": home}, "optimizer": {"masters": "split", "clip": clip}}
    assert_equal(verify(run_on_device(tmp_path, model={"dtype": "bf16"}, **sections)))


def test_fp16_with_its_loss_scale(tmp_path: Path):
    assert_equal(verify(run_on_device(tmp_path, model={"dtype": "fp16"})))


def test_the_model_s_own_loss_and_no_clipping(tmp_path: Path):
    sections = {"train": {"loss": "model"}, "optimizer": {"max_grad_norm": 0.0}}
    assert_equal(verify(run_on_device(tmp_path, model={"dtype": "bf16"}, **sections)))


@pytest.mark.parametrize("pack", ["none", "documents"])
def test_sequences_that_are_padded_or_hold_several_documents_have_masks(pack: str, tmp_path: Path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(f'{{"text": "{"ab" * (number % 7)}."}}\n' for number in range(40)))
    data = {"path": str(path), "pack": pack}
    assert_equal(verify(run_on_device(tmp_path, model={"dtype": "bf16"}, data=data)))


def test_two_runs_give_the_same_bits(tmp_path: Path):
    losses = []
    for name in ("one", "two"):
        result = verify(run_on_device(tmp_path / name, model={"dtype": "bf16"}))
        losses.append((result.loss_streamed, result.digest_streamed))
    assert losses[0] == losses[1]


def test_host_memory_is_pinned_and_buffers_lie_on_the_device(tmp_path: Path):
    prepared = prepare(RunSpec.of(run_on_device(tmp_path, "gpt2"), tmp_path), lambda _: None)
    model = prepared.split.model
    with StreamedTrainer(prepared, tmp_path) as trainer:
        held = trainer.session.host.statistics()
        assert held.num_bytes > 0
        assert held.num_pageable_fallbacks == 0
        assert held.pinned_bytes == (held.num_bytes if ON_ACCELERATOR else 0)
        assert {buffer.device.type for buffer in model.buffers()} <= {DEVICE.partition(":")[0], "cpu"}
        assert not ON_ACCELERATOR or all(is_accelerator(buffer.device) for buffer in model.buffers())
    assert not any(is_accelerator(buffer.device) for buffer in model.buffers())


def test_the_timeline_is_the_device_s(tmp_path: Path):
    """Ops of one lane do not overlap, and each unit computes after it was loaded."""
    config = run_on_device(tmp_path, model={"dtype": "bf16"}, memory={"slots": 2, "offload": True})
    result = train(config)
    trace = json.loads((Path(result.run_dir) / "timeline.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lanes: dict[int, list[Any]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        lanes.setdefault(event["tid"], []).append(event)
    tolerance_us = 5.0  # clocks of different events
    for ops in lanes.values():
        ends = [op["ts"] + op["dur"] for op in ops]
        starts = [op["ts"] for op in ops]
        assert all(end <= start + tolerance_us for end, start in zip(ends[:-1], starts[1:], strict=True))
    names = {event["name"].partition(" ")[0] for event in events}
    assert {"B", "LOAD", "GRAD"} <= names
    assert names & {"F", "FA", "FP", "FK"}  # whichever the rates of the machine lead to
    assert 0.0 <= result.stall_share <= 1.0
