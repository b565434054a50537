"""What a backward needs may be recomputed or kept, unit by unit and microbatch by microbatch: the bits are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from outsize.config import Config
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Choice
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.short_runs import verify
from planner.layouts import first_kept
from reference import Recipe
from runtime.engines import train as train_engine
from runtime.oddities import Sparse
from runtime.test_engine import batches, make
from support import make_batches, make_run, run_streamed
from test_exactness import compare

KEEP = {"activations": "keep"}


def kinds(plan: Any) -> set[Kind]:
    return {op.kind for op in plan.program}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("llama_tied", {"train": {"microbatches": 2}}),
        ("gemma2", {"train": {"microbatches": 3}, "memory": {"slots": 1}}),
        ("qwen3_moe", {"train": {"microbatches": 2}, "memory": {"device": "emulated:1", "home": "disk"}}),
        ("llama", {"model": {"dtype": "fp16"}, "train": {"microbatches": 2}}),
        ("llama", {"train": {"loss": "chunked", "head_chunk_tokens": 5, "microbatches": 2}}),
        ("llama", {"model": {"freeze": ("model.embed_tokens.*", "model.layers.0.*")}}),
        ("gpt2", {"model": {"freeze": ("*attn*",)}, "optimizer": {"max_grad_norm": 0.05}}),
        ("llama", {"memory": {"offload": True, "home": "disk"}, "train": {"microbatches": 3}}),
    ],
)
def test_kept_activations_change_no_bit(name: str, sections: dict[str, Any], tmp_path: Path):
    memory = {**KEEP, **sections.get("memory", {})}
    got = compare(name, tmp_path, **{**sections, "memory": memory})
    assert Kind.FORWARD_KEEP in kinds(got.plan)
    assert Kind.FORWARD not in kinds(got.plan) or got.plan.layout.first_backward > 0


STEPS = 2
CHOICES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from([0.0, 0.5]))


@settings(max_examples=12)
@given(choices=CHOICES, data=st.data())
def test_any_choice_of_what_is_kept_is_exact(
    tmp_path_factory: pytest.TempPathFactory, choices: tuple[int, int, bool, float], data: Any
):
    """Experts that get no gradient in a step included."""
    count, slots, offload, max_grad_norm = choices
    model = make(Sparse)
    choices_of = st.lists(st.sampled_from(Choice), min_size=count, max_size=count)
    kept = tuple(tuple(data.draw(choices_of)) for _ in range(1 + len(model.blocks)))
    got = train_engine(
        model,
        batches(count, STEPS),
        tmp_path_factory.mktemp("run"),
        slots=slots,
        offload=offload,
        max_grad_norm=max_grad_norm,
        kept=(*kept, (Choice.RECOMPUTE,) * count),
    )
    recipe = Recipe(steps=STEPS, schedule="constant", causal=False, max_grad_norm=max_grad_norm)
    want = reference.train(make(Sparse), batches(count, STEPS), recipe)
    assert got.losses == want.losses
    assert all(torch.equal(got.weights[name], weight) for name, weight in want.weights.items())


@pytest.mark.parametrize(
    ("choice", "name", "sections"),
    [
        ("keep-attention", "llama_tied", {"train": {"microbatches": 2}}),
        ("keep-products", "qwen3_moe", {"train": {"microbatches": 2}, "memory": {"home": "disk"}}),
        ("keep-products", "llama", {"memory": {"device": "emulated:2"}, "train": {"microbatches": 3}}),
        ("keep-attention", "llama", {"memory": {"device": "emulated:2"}, "train": {"microbatches": 3}}),
        ("keep-products", "gpt2", {"optimizer": {"max_grad_norm": 0.05}, "model": {"freeze": ("*attn*",)}}),
        ("keep-attention", "gpt_neox", {"train": {"microbatches": 3}, "memory": {"slots": 1}}),
        ("offload-attention", "llama", {"model": {"dtype": "bf16"}, "train": {"microbatches": 3}}),
        ("offload-products", "llama", {"memory": {"offload": True}, "train": {"microbatches": 2}}),
        ("offload-products", "qwen3_moe", {"memory": {"home": "disk"}, "train": {"microbatches": 2}}),
        ("offload", "llama", {"model": {"dtype": "bf16"}, "memory": {"offload": True}}),
        ("offload", "qwen3_moe", {"memory": {"device": "emulated:1"}, "train": {"microbatches": 2}}),
        ("offload", "gemma2", {"memory": {"home": "disk", "slots": 1}, "train": {"microbatches": 3}}),
        ("offload-products", "llama", {"model": {"freeze": ("model.embed_tokens.*", "model.layers.0.*")}}),
        ("offload-products", "llama", {"memory": {"device": "emulated:3"}, "train": {"microbatches": 4}}),
        (
            "offload-attention",
            "qwen3_moe",
            {"memory": {"device": "emulated:3"}, "model": {"dtype": "bf16"}, "train": {"microbatches": 4}},
        ),
        (
            "offload-products",
            "llama",
            {
                "memory": {"device": "emulated:2", "home": "disk"},
                "model": {"freeze": ("*embed_tokens*",)},
                "train": {"microbatches": 2},
            },
        ),
    ],
)
def test_every_choice_is_exact(choice: str, name: str, sections: dict[str, Any], tmp_path: Path):
    memory = {"activations": choice, **sections.get("memory", {})}
    got = compare(name, tmp_path, **{**sections, "memory": memory})
    assert Choice(choice).forward in kinds(got.plan)
    assert (Kind.OFFLOAD in kinds(got.plan)) == (Kind.ONLOAD in kinds(got.plan)) == Choice(choice).leaves


@pytest.mark.parametrize(
    ("choice", "device"),
    [
        ("keep-products", "cpu"),
        ("offload-products", "cpu"),
        ("offload", "cpu"),
        ("offload-products", "emulated:3"),
    ],
)
def test_dropout_draws_the_same_whatever_is_kept(choice: str, device: str, tmp_path: Path):
    memory = {"activations": choice, "device": device}
    compare("gpt2", tmp_path, dropout=0.2, train={"microbatches": 2}, memory=memory)


def test_several_workers_say_what_cannot_leave_them(tmp_path: Path):
    memory = {"activations": "offload", "device": "emulated:2"}
    with pytest.raises(ConfigError, match="stays with the worker that made it; use offload-products"):
        prepare(RunSpec.of(make_run(tmp_path, memory=memory), tmp_path / "run"), lambda _: None)


def test_by_default_what_has_room_is_kept_and_the_rest_recomputed(tmp_path: Path):
    """Between the least budget and plenty there is one where some microbatches of some units are kept."""
    sections: dict[str, Any] = {"train": {"microbatches": 4, "steps": 2}}
    plenty = prepare(RunSpec.of(make_run(tmp_path, **sections), tmp_path / "run"), lambda _: None).plan
    none = {"activations": "recompute"}
    least = prepare(
        RunSpec.of(make_run(tmp_path, memory=none, **sections), tmp_path / "run"), lambda _: None
    ).plan
    assert plenty.layout.kept == first_kept((4, 4, 4, 4, 0), 4)
    between = (plenty.total_bytes("device") + least.total_bytes("device")) // 2
    config = make_run(tmp_path, memory={"device_memory": between}, **sections)
    plan = prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None).plan
    assert plan.total_bytes("device") <= between
    assert {Kind.FORWARD, Kind.FORWARD_KEEP} <= kinds(plan)
    assert verify(config).equal


def test_budgets_change_no_bit(tmp_path: Path):
    traces = [
        run_streamed(
            make_run(
                tmp_path,
                memory={"activations": activations, "device_memory": size},
                train={"microbatches": 2, "steps": 3, "tokens_per_step": 64},
            ),
            make_batches("llama"),
            tmp_path / f"{activations}{size}",
        )[0]
        for activations, size in (("recompute", "1GiB"), ("auto", "1GiB"), ("auto", "2MiB"))
    ]
    assert traces[0].losses == traces[1].losses == traces[2].losses


@pytest.mark.parametrize("choice", ["offload", "offload-products", "recompute"])
def test_the_least_budget_over_a_disk_holds_what_moves_activations_there(choice: str, tmp_path: Path):
    """Inputs and what forwards keep go to files of their own, each with buffers for what is not aligned."""
    sections: dict[str, Any] = {
        "data": {"seq_len": 64},
        "train": {"microbatches": 1, "steps": 1, "tokens_per_step": 16 * 64},
    }
    memory = {"home": "disk", "device": "cpu", "activations": choice, "offload": True}

    def run(size: int) -> Config:
        return make_run(tmp_path, memory={**memory, "device_memory": size}, **sections)

    size, result = 1000, None
    for _ in range(4):  # what a microbatch takes is measured anew each time, and may be some pages more
        try:
            result = verify(run(size))
            break
        except InfeasiblePlanError as error:
            size += error.short_by["device"]
    assert result is not None
    assert result.equal
