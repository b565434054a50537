"""What a microbatch needs is measured on the device that computes, and leaves nothing there."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, PreTrainedModel

from accelerator import late
from devices import IS_MADE_UP
from outsize.accelerators import CPU, Devices
from outsize.model import compiled
from outsize.model.build import build_skeleton
from outsize.model.split import split
from outsize.model.walk import Boundaries
from outsize.runtime.trial.calibrate import calibrate
from outsize.runtime.trial.measured import KnownRows, Measured
from outsize.session.job.demand import made_up_inputs
from outsize.training.run import train
from support import end_of, in_dir, make_run
from train.test_compile import CHEAP

pytestmark = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")
HEADS, HEAD_DIM, TOKENS = 4, 16, 1024
LATE = Devices.parse("late:0") if IS_MADE_UP else Devices()


@pytest.fixture
def bits_repeat() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def measure(devices: Devices, num_sequences: int = 1, **more: Any) -> Measured:
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=16,  # so that attention takes the most
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=TOKENS,
        attn_implementation="sdpa",
    )
    parts = split(build_skeleton(config).to(torch.bfloat16))
    buffers = list(parts.model.buffers())
    with Boundaries(parts.modules) as boundaries:
        measured = calibrate(
            parts,
            boundaries.forwards,
            partial(made_up_inputs, "stream", config),
            num_sequences=num_sequences,
            seq_len=TOKENS,
            chunk_tokens=256,
            devices=devices,
            **more,
        )
    assert all(one is other for one, other in zip(parts.model.buffers(), buffers, strict=True))
    return measured


@pytest.mark.usefixtures("bits_repeat")
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_memory_that_kernels_take_inside_themselves_is_measured(num_sequences: int):
    """Flash attention takes gigabytes in a backward at 32K tokens where bits repeat, and a CPU's takes none."""
    on_cpu, on_device = measure(CPU, num_sequences), measure(LATE, num_sequences)
    partial_sums = 16 * 4 * num_sequences * TOKENS * HEADS * HEAD_DIM
    for block in (1, 2, 3):
        more = on_device.backward_bytes[block] - on_cpu.backward_bytes[block]
        assert partial_sums / 2 < more < partial_sums
        assert on_device.saved_bytes[block] == pytest.approx(on_cpu.saved_bytes[block], abs=64)
        assert on_device.forward_bytes[block] == pytest.approx(on_cpu.forward_bytes[block], rel=0.01)
    # All else is what the host's trial says, kernels of attention with random states in their graph or not.
    for name in ("boundary_bytes", "num_saved", "needed", "flops", "effects", "plain_head", "num_products"):
        assert getattr(on_device, name) == getattr(on_cpu, name), name
    for here, there in zip(on_device.attention[1:4], on_cpu.attention[1:4], strict=True):
        assert here.flops == there.flops > 0  # in one operation, which can be kept, there too
        assert here.num_bytes == pytest.approx(there.num_bytes, abs=64)


def test_a_trial_leaves_no_trace_on_the_device():
    module = torch.get_device_module("late")
    states = torch.get_rng_state(), module.get_rng_state()
    before = module.memory_allocated(0)
    measure(LATE)
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], module.get_rng_state())
    assert module.memory_allocated(0) == before


def test_a_device_without_room_for_its_trial_says_so():
    lines: list[str] = []
    late.set_limit(0, 6 * 2**20)
    short = measure(LATE, 2, announce=lines.append)
    assert [line.partition(";")[0] for line in lines] == [
        "trial: a microbatch of 2 sequences of 1024 tokens does not fit late:0"
    ]
    late.set_limit(0, 1024)
    assert measure(LATE, 2, announce=lines.append) == measure(CPU, 2)
    assert lines[1:] == ["trial: a unit does not fit late:0; what it takes is measured on the CPU"]
    assert short.boundary_bytes == measure(CPU, 2).boundary_bytes


def test_passes_are_run_once_for_each_size():
    rows = KnownRows()
    first = measure(LATE, 2, rows=rows)
    names = set(rows._noted)
    assert measure(LATE, 2, rows=rows) == first
    measure(LATE, 1, rows=rows)
    assert set(rows._noted) - names == {f"late full (1, {TOKENS})"}


@torch.library.custom_op("outsize_tests::attend", mutates_args=())
def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """As an operation of flash-attn: it has a form without numbers, and numbers of a device alone."""
    if query.device.type != "late":
        raise NotImplementedError("FlashAttention only supports CUDA tensors")
    return softmax_of(query, key, scale) @ value


@attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("outsize_tests::attend_backward", mutates_args=())
def attend_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = softmax_of(query, key, scale)
    of_weights = gradient @ value.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient


@attend_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, scale: float) -> Any:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.scale = inputs[3]


def backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return *attend_backward(gradient, *ctx.saved_tensors, ctx.scale), None


attend.register_autograd(backward, setup_context=keep)


def softmax_of(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * scale
    later = torch.ones(scores.shape[-2:], device=scores.device).triu(1) * -1e9
    return torch.softmax(scores + later, -1)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_that_no_host_runs_are_tried_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As those with flash-attn, whose operations torch compiles, and no CPU runs."""

    def of_device(module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float, **__: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        return attend(query, key, value, scaling).transpose(1, 2).contiguous(), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", of_device)
    name = "_check_and_adjust_attn_implementation"
    monkeypatch.setattr(PreTrainedModel, name, lambda model, asked, *_, **__: asked)
    monkeypatch.setattr(compiled, "BACKEND", CHEAP)
    ends, said = [], list[str]()
    for blocks in ("off", "blocks"):
        model = {"attention": "flash_attention_2", "compile": blocks}
        config = make_run(tmp_path, memory={"device": "late:0", "home": "host"}, model=model)
        train(in_dir(config, tmp_path / blocks), announce=said.append)
        ends.append(end_of(tmp_path / blocks))
    assert not any("LlamaDecoderLayer runs as it is" in line for line in said)
    for name, tensor in ends[0].items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(tensor, ends[1][name])


def test_attention_that_takes_tensors_of_a_device_alone_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As flash-attn's, which many scripts load their models with."""
    seen: list[str] = []
    of_torch = AttentionInterface._global_mapping["sdpa"]

    def of_device(module: Any, query: torch.Tensor, *args: Any, **named: Any) -> Any:
        if query.device.type != "late":
            raise RuntimeError("FlashAttention only supports CUDA tensors")
        seen.append(str(query.device))
        return of_torch(module, query, *args, **named)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", of_device)
    name = "_check_and_adjust_attn_implementation"
    monkeypatch.setattr(PreTrainedModel, name, lambda model, asked, *_, **__: asked)
    runs = []
    for attention in ("sdpa", "flash_attention_2"):
        config = make_run(
            tmp_path, memory={"device": "late:0", "home": "host"}, model={"attention": attention}
        )
        runs.append(tmp_path / attention)
        train(in_dir(config, runs[-1]))
        assert bool(seen) == (attention != "sdpa")
    ends = [
        {name: value for name, value in end_of(run).items() if isinstance(value, torch.Tensor)}
        for run in runs
    ]
    assert ends[0]
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
