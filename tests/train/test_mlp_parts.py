"""Runs whose MLPs take their tokens in parts: streamed equals resident, whatever is kept and wherever it runs."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from outsize.errors import InfeasiblePlanError, ModelError
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import plan
from outsize.training.short_runs import verify
from support import make_model_dir, make_run

BF16 = {"dtype": "bf16"}
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"model": BF16},
    "in one op with the loss": {"train": {"loss": "model", "microbatches": 1}},
    "disk": {"memory": {"home": "disk", "slots": 2}},
    "recompute": {"memory": {"activations": "recompute"}},
    "all kept": {"memory": {"activations": "keep"}},
    "attention kept": {"memory": {"activations": "keep-attention"}},
    "products offloaded": {"memory": {"activations": "offload-products", "device": "emulated:1"}},
    "three workers": {"memory": {"device": "emulated:3"}},
    "a frozen prefix": {"model": {"freeze": ("model.embed_tokens.*", "model.layers.0.self_attn.*")}},
}


LORA = {"r": 2, "target_modules": ("q_proj", "v_proj")}
# Of other models, whose MLPs are mixtures of experts but for the first: that one's layers take matrices.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {"memory": {"activations": "recompute"}}),
    "gpt_oss, bf16, three workers": ("gpt_oss", {"model": BF16, "memory": {"device": "emulated:3"}}),
    "deepseek_v3, products kept": ("deepseek_v3", {"memory": {"activations": "keep-products"}}),
    "qwen3_moe, offloaded": ("qwen3_moe", {"memory": {"activations": "offload", "device": "emulated:1"}}),
    "qwen3_moe, router loss": ("qwen3_moe", {"train": {"loss": "model"}}),
    "qwen3_moe, lora, rounds": (
        "qwen3_moe",
        {"train": {"method": "lora", "microbatches": 4, "round_microbatches": 2}, "lora": LORA},
    ),
}


@pytest.mark.parametrize("case", [*RUNS, *OTHERS])
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    name, sections = OTHERS[case] if case in OTHERS else ("llama", RUNS[case])
    if case.endswith("router loss"):
        make_model_dir(tmp_path / "model", name, output_router_logits=True, router_aux_loss_coef=1.0)
    run = make_run(tmp_path, name, **{**sections, "train": {**sections.get("train", {}), "mlp_parts": 3}})
    result = verify(run)
    assert (result.equal, result.differing) == (True, [])
    assert result.loss_streamed[-1] < result.loss_streamed[0]


def test_both_runs_compute_in_as_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the runs above would show nothing. Whether the bits tell is the processor's affair: they may be equal."""
    runs: list[set[int]] = []
    forward = LlamaMLP.forward

    def recorded(mlp: LlamaMLP, hidden: Tensor) -> Tensor:
        if runs:
            runs[-1].add(hidden.shape[-2])
        return forward(mlp, hidden)

    def announce(line: str) -> None:
        if line in ("streamed run", "resident run"):
            runs.append(set())

    monkeypatch.setattr(LlamaMLP, "forward", recorded)
    for num_parts, tokens in (1, {16}), (3, {10, 11}):
        runs.clear()
        verify(make_run(tmp_path / str(num_parts), train={"mlp_parts": num_parts}), announce=announce)
        assert runs == [tokens, tokens]


def test_a_block_s_backward_needs_less_memory(tmp_path: Path) -> None:
    whole, parted = (
        prepare(
            RunSpec.of(make_run(tmp_path / str(n), train={"mlp_parts": n}), tmp_path), lambda _: None
        ).measured
        for n in (1, 4)
    )
    assert parted.backward_bytes[1] < whole.backward_bytes[1]


@pytest.mark.parametrize("name", ["llama", "phi", "arcee", "qwen3_moe", "gpt_oss"])
def test_a_recompute_ends_before_the_mlp(name: str, tmp_path: Path) -> None:
    """Whatever it is made of: an activation in one operation, a tanh of powers, a square, or a router and experts."""
    whole, parted = (
        prepare(RunSpec.of(make_run(tmp_path / str(n), name, train={"mlp_parts": n}), tmp_path), str).measured
        for n in (1, 3)
    )
    assert parted.needed[1].in_parts
    assert parted.needed[1].num_saved < whole.num_saved[1]


def test_a_model_without_such_mlps_is_refused_before_work_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"mlp_parts: .* leave it at 1"):
        plan(make_run(tmp_path, "bert", train={"mlp_parts": 2, "loss": "model"}))


def test_parts_are_advised_where_blocks_lack_room_and_can_go_in_parts(tmp_path: Path) -> None:
    """Not where they go in parts already, and not where the head is what is large."""
    tight = {"memory": {"device_memory": "150KiB"}}
    for train, advised in ({"mlp_parts": 1}, True), ({"mlp_parts": 4}, False):
        with pytest.raises(InfeasiblePlanError) as raised:
            plan(make_run(tmp_path / str(advised), train={**train, "head_chunk_tokens": 4}, **tight))
        assert ("train.mlp_parts=4" in str(raised.value)) == advised, str(raised.value)
