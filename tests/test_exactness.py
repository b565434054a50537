"""The promise that everything else serves: a streamed run ends bit for bit where plain PyTorch training ends.

The invariant is one sentence: losses, gradients and weights do not depend on slots, homes, devices, offloading or where
tensors lie, and they are those of `reference.train`. Only tied weights leave room: their
gradient is a sum over the units that share them as well as over microbatches, and streaming takes it unit by unit.
"""

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import reference
import zoo
from outsize.data.batch import IGNORED, Batch
from outsize.errors import ModelError
from reference import Trace
from support import (
    DTYPES,
    Streamed,
    make_batches,
    make_config,
    microbatches,
    recipe_of,
    reseed_of,
    run_streamed,
    save_model,
    unit_names,
)
from threads import num_threads

ROUNDING = 1e-6
# One of each kind: rotary and learned and ALiBi positions, MoE, sinks, soft caps, sliding windows, latent attention,
# parallel blocks, fused projections, state spaces, tied and untied heads, an encoder.
FAMILIES = (
    "llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "mistral", "mixtral", "gemma2", "gemma3_text",
    "phi3", "gpt2", "gpt_neox", "falcon", "bloom", "opt", "olmo2", "olmoe", "gpt_oss", "deepseek_v3", "cohere2",
    "granite", "llama4_text", "mamba2", "bert", "modernbert",
)  # fmt: skip
OTHERS = tuple(name for name in zoo.ARCHITECTURES if name not in FAMILIES)
# What backwards need takes turns as well.
KEPT = ("recompute", "keep")
COMBINATIONS = tuple(itertools.product((1, 2, 3), (2, 4), ("host", "disk")))


def is_tied(model: nn.Module) -> bool:
    return len(list(model.named_parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


def differences(got: Trace, want: Trace, tolerance: float = 0.0) -> list[str]:
    """Say where two runs differ by more than ``tolerance``: loss, gradients, weights."""
    found = []
    for step, (ours, theirs) in enumerate(zip(got.losses, want.losses, strict=True)):
        if not abs(ours - theirs) <= tolerance:
            found.append(f"loss of step {step}: {ours} is not {theirs}")
    tables = [
        (f"gradient of step {i}", *pair)
        for i, pair in enumerate(zip(got.gradients, want.gradients, strict=True))
    ]
    for what, ours, theirs in [*tables, ("weight", got.weights, want.weights)]:
        if ours.keys() != theirs.keys():  # type: ignore[attr-defined]
            found.append(f"{what}: only one side has {sorted(ours.keys() ^ theirs.keys())}")  # type: ignore[attr-defined]
        found += [
            f"{what} {name} differs by {float((ours[name] - theirs[name]).abs().max()):.2g}"
            for name in ours.keys() & theirs.keys()  # type: ignore[attr-defined]
            if not within(ours[name], theirs[name], tolerance)
        ]
    return found


def within(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(tolerance and (one - other).abs().max() <= tolerance)


def compare(
    name: str, directory: Path, *, batches: list[Batch] | None = None, dropout: float = 0.0, **sections: Any
) -> Streamed:
    """Train architecture ``name`` both ways, assert that nothing differs, and return the streamed run."""
    model = zoo.build(name, dropout=dropout)
    batches = make_batches(name) if batches is None else batches
    return compare_model(model, batches, directory, causal=not zoo.is_masked(name), **sections)


def compare_model(
    network: nn.Module, batches: list[Batch], directory: Path, *, causal: bool = True, **sections: Any
) -> Streamed:
    save_model(network, directory / "model")
    count = sections.get("train", {}).get("microbatches", 1)
    tolerance = 0.0
    if is_tied(network) and count > 1:
        # Adam turns the rounding of a gradient that is zero in theory (of a key bias) into lr times some fraction.
        tolerance = ROUNDING
        sections["optimizer"] = {"lr": 2e-5, **sections.get("optimizer", {})}
    config = make_config(directory / "model", batches, **sections)
    got, prepared = run_streamed(config, batches, directory / "run")
    dtype = config.model.dtype
    masters = None
    if dtype != "fp32":
        masters = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        network = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=DTYPES[dtype]).train()
    recipe = recipe_of(
        config,
        causal=causal,
        chunk_tokens=prepared.chunk_tokens,
        head="lm_head",
        loss_scale=2.0**16 if dtype == "fp16" else 1.0,
        units=unit_names(prepared.split),
        reseed=reseed_of(config.train.seed),
    )
    want = reference.train(network, microbatches(batches, count), recipe, masters)
    assert differences(got, want, tolerance) == []
    if config.optimizer.max_grad_norm:
        assert got.norms == pytest.approx(want.norms, rel=1e-6 if tolerance else 0, abs=0)
    return got


# --- architectures, slots, homes, microbatches --------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_exact(name: str, count: int, tmp_path: Path):
    """Each family with 1 and 3 microbatches (4 sequences by 3: uneven); slots, homes and what is kept take turns."""
    turn = FAMILIES.index(name) + count // 3
    _, slots, home = COMBINATIONS[turn % 4]
    memory = {"slots": slots, "home": home, "activations": KEPT[turn % 2]}
    compare(name, tmp_path, train={"microbatches": count}, memory=memory)


@pytest.mark.parametrize(("count", "slots", "home"), COMBINATIONS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_every_combination_is_exact(name: str, count: int, slots: int, home: str, tmp_path: Path):
    kept = KEPT[(COMBINATIONS.index((count, slots, home)) + (name == "llama")) % 2]
    memory = {"slots": slots, "home": home, "activations": kept}
    compare(name, tmp_path, train={"microbatches": count}, memory=memory)


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_architecture_is_exact(name: str, tmp_path: Path):
    count, slots, home = COMBINATIONS[OTHERS.index(name) % len(COMBINATIONS)]
    compare(name, tmp_path, train={"microbatches": count}, memory={"slots": slots, "home": home})


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gpt2"])
def test_one_slot_is_enough(name: str, home: str, tmp_path: Path):
    compare(name, tmp_path, memory={"slots": 1, "home": home})


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "bloom", "rwkv"])
def test_an_emulated_device_is_exact(name: str, home: str, tmp_path: Path):
    """Over a disk home weights pass through host buffers here, which they do not on ``cpu``."""
    memory = {"device": "emulated:1", "home": home, "link_gb_per_s": 50.0}
    compare(name, tmp_path, memory=memory)


@pytest.mark.parametrize("device", ["cpu", "emulated:1"])
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neox"])
def test_offloaded_activations_come_back_exactly(name: str, home: str, device: str, tmp_path: Path):
    memory = {"device": device, "home": home, "offload": True, "slots": 2}
    got = compare(name, tmp_path, train={"microbatches": 3}, memory=memory)
    assert got.plan.layout.offload == {1, 2, 3}
    saved = {op.unit for op in got.plan.program if op.kind == "SAVE"}
    assert saved == {1, 2, 3}


def test_tiles_of_the_optimizer_are_exact(tmp_path: Path):
    """Tiles of 2048 elements end inside parameters."""
    got = compare("llama", tmp_path, memory={"home": "disk", "tile_elements": 2048})
    assert max(got.plan.layout.tiles) > 3


# --- losses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["llama", "phi", "gpt_neox"])
def test_a_chunked_loss_is_that_of_the_same_chunks(name: str, count: int, dtype: str, tmp_path: Path):
    """Chunks of 5 tokens end inside sequences; the last one is shorter. ``phi`` has a head with a bias."""
    train = {"microbatches": count, "loss": "chunked", "head_chunk_tokens": 5}
    got = compare(name, tmp_path, train=train, model={"dtype": dtype})
    assert got.chunk_tokens == 5


def test_a_chunked_loss_with_tied_weights(tmp_path: Path):
    train = {"microbatches": 2, "loss": "chunked", "head_chunk_tokens": 7}
    compare("llama_tied", tmp_path, train=train)


def test_auto_takes_chunks_only_where_nothing_but_cross_entropy_follows_the_head(tmp_path: Path):
    plain = compare("llama", tmp_path / "llama", train={"loss": "auto"})
    capped = compare("gemma2", tmp_path / "gemma2", train={"loss": "auto"})
    assert (plain.chunk_tokens, capped.chunk_tokens) == (512, None)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "bert"])
def test_chunks_are_refused_where_the_loss_is_another(name: str, tmp_path: Path):
    save_model(zoo.build(name), tmp_path / "model")
    config = make_config(tmp_path / "model", make_batches(name), train={"loss": "chunked"})
    with pytest.raises(ModelError, match=r"use train\.loss=model"):
        run_streamed(config, [], tmp_path / "run")


# --- precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "name", ["llama", "qwen3_moe", "mixtral", "olmo2", "gpt_neox", "deepseek_v3", "phi3"]
)
def test_bf16_is_exact(name: str, count: int, home: str, tmp_path: Path):
    compare(
        name,
        tmp_path,
        model={"dtype": "bf16"},
        train={"microbatches": count},
        optimizer={"max_grad_norm": 0.5},
        memory={"home": home, "activations": KEPT[(count > 1) == (home == "disk")]},
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_fp16_is_exact(name: str, count: int, tmp_path: Path):
    compare(name, tmp_path, model={"dtype": "fp16"}, train={"microbatches": count})


def test_fp16_leaves_out_steps_that_overflow(tmp_path: Path):
    """A loss scale of 65536 is too much for this model at first, and halves until it is not."""
    name, batches = "llama", make_batches("llama", num_steps=5)
    model = zoo.build(name)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    save_model(model, tmp_path / "model")
    config = make_config(tmp_path / "model", batches, model={"dtype": "fp16"})
    got, _ = run_streamed(config, batches, tmp_path / "run")
    low = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float16).train()
    masters = {n: p.detach() for n, p in model.named_parameters()}
    recipe = recipe_of(config, loss_scale=2.0**16)
    want = reference.train(low, microbatches(batches, 1), recipe, masters)
    skipped = [not torch.tensor(norm).isfinite() for norm in want.norms]
    assert any(skipped)
    assert not all(skipped)
    assert got.skipped == skipped
    assert got.losses == want.losses
    assert all(torch.equal(got.weights[n], weight) for n, weight in want.weights.items())


# --- clipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "llama_tied", "bert"])
def test_clipping_is_exact(name: str, count: int, home: str, tmp_path: Path):
    got = compare(
        name,
        tmp_path,
        train={"microbatches": count},
        optimizer={"max_grad_norm": 0.05},
        memory={"home": home},
    )
    assert min(got.norms) > 0.05


def test_a_norm_below_the_limit_changes_nothing(tmp_path: Path):
    loose = compare("llama", tmp_path / "loose", optimizer={"max_grad_norm": 1e6})
    off = compare("llama", tmp_path / "off", optimizer={"max_grad_norm": 0.0})
    assert differences(loose, off) == []


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_and_optimizer_settings_are_exact(schedule: str, tmp_path: Path):
    optimizer = {
        "schedule": schedule,
        "warmup_steps": 2,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.5,
    }
    compare("qwen2", tmp_path, batches=make_batches("qwen2", num_steps=5), optimizer=optimizer)


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2", "bert", "phi", "persimmon"])
def test_dropout_is_exact(name: str, count: int, tmp_path: Path):
    """Seeds depend on step, unit and microbatch alone; equal gradients mean equal masks in forward and recompute."""
    memory = {"home": "disk", "activations": KEPT[count - 1]}
    compare(name, tmp_path, dropout=0.2, train={"microbatches": count}, memory=memory)


def test_another_seed_draws_other_masks(tmp_path: Path):
    first = compare("gpt_neox", tmp_path / "first", dropout=0.2, train={"seed": 5})
    again = compare("gpt_neox", tmp_path / "again", dropout=0.2, train={"seed": 5}, memory={"slots": 1})
    other = compare("gpt_neox", tmp_path / "other", dropout=0.2, train={"seed": 6})
    assert first.losses == again.losses
    assert all(a != b for a, b in zip(first.losses, other.losses, strict=True))


@pytest.mark.parametrize("name", ["phimoe"])
def test_random_routing_is_exact(name: str, tmp_path: Path):
    compare(name, tmp_path, train={"microbatches": 2})


# --- frozen parameters --------------------------------------------------------------------------------------

FROZEN = {
    "prefix": ("model.embed_tokens.*", "model.layers.0.*"),
    "middle": ("model.layers.1.*",),
    "head": ("lm_head.*",),
    "head and last block": ("lm_head.*", "model.layers.2.*"),
    "rest": ("model.norm.weight",),
    "parts of units": ("*self_attn*", "*.gate_proj.*"),
    "all but the head": ("model.*",),
    "all but one": ("model.embed_tokens.*", "model.layers.[02].*", "model.norm.*", "lm_head.*"),
}


@pytest.mark.parametrize("loss", ["model", "chunked"])
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("freeze", FROZEN.values(), ids=FROZEN.keys())
def test_frozen_parameters_stay_and_the_others_train_exactly(
    freeze: tuple[str, ...], home: str, loss: str, tmp_path: Path
):
    before = dict(zoo.build("llama").named_parameters())
    got = compare(
        "llama",
        tmp_path,
        model={"freeze": freeze},
        train={"microbatches": 2, "loss": loss, "head_chunk_tokens": 7},
        optimizer={"max_grad_norm": 0.5},
        memory={"home": home},
    )
    trained = got.gradients[0].keys()
    assert trained
    for name, weight in got.weights.items():
        assert torch.equal(weight, before[name]) == (name not in trained), name


@pytest.mark.parametrize("masters", ["separate", "split"])
@pytest.mark.parametrize("freeze", [FROZEN["parts of units"], FROZEN["all but one"]])
def test_frozen_parameters_stay_in_bf16_on_disk(freeze: tuple[str, ...], masters: str, tmp_path: Path):
    """There a tile's weights are made from separate masters, those that do not step included."""
    got = compare(
        "llama",
        tmp_path,
        model={"dtype": "bf16", "freeze": freeze},
        optimizer={"masters": masters},
        memory={"home": "disk"},
    )
    before = dict(zoo.build("llama").named_parameters())
    frozen = before.keys() - got.gradients[0].keys()
    assert frozen
    assert all(torch.equal(got.weights[name], before[name].bfloat16()) for name in frozen)


def test_a_frozen_tied_embedding(tmp_path: Path):
    compare("llama_tied", tmp_path, model={"freeze": ("model.embed_tokens.*",)}, train={"microbatches": 2})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_parameter_without_a_gradient_neither_decays_nor_moves(dtype: str, tmp_path: Path):
    """In this model routing never reaches the experts of some layers."""
    before = dict(zoo.build("longcat_flash").named_parameters())
    got = compare(
        "longcat_flash",
        tmp_path,
        model={"dtype": dtype},
        optimizer={"weight_decay": 0.5},
        memory={"home": "disk"},
    )
    idle = before.keys() - got.gradients[0].keys()
    assert idle
    assert all(torch.equal(got.weights[name], before[name].to(got.weights[name].dtype)) for name in idle)


# --- batches ------------------------------------------------------------------------------------------------


@cache
def uneven_batches() -> tuple[Batch, ...]:
    """Rows with all, few, one and no targets."""
    batches = []
    for batch in make_batches("llama", num_sequences=4):
        labels = batch.input_ids.clone()
        labels[1, :-3] = IGNORED
        labels[2, :-1] = IGNORED
        labels[3] = IGNORED
        batches.append(Batch(batch.input_ids, labels))
    return tuple(batches)


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("loss", ["model", "chunked"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_uneven_targets_weigh_by_token(count: int, loss: str, home: str, tmp_path: Path):
    """With four microbatches the last one has no target at all: its mean is NaN, and weighs nothing."""
    train = {"microbatches": count, "loss": loss, "head_chunk_tokens": 7}
    compare("llama", tmp_path, batches=list(uneven_batches()), train=train, memory={"home": home})


def test_the_number_of_microbatches_changes_only_rounding(tmp_path: Path):
    losses = [
        compare("llama", tmp_path / str(m), batches=list(uneven_batches()), train={"microbatches": m}).losses
        for m in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bloom"])
def test_padding_is_exact(name: str, side: str, tmp_path: Path):
    batches = []
    for batch in make_batches(name):
        mask = torch.ones_like(batch.input_ids)
        for row, length in enumerate((0, 3, 5, 1)):
            mask[row, slice(None, length) if side == "left" else slice(12 - length, None)] = 0
        batches.append(
            Batch(batch.input_ids * mask, batch.labels.masked_fill(mask == 0, IGNORED), attention_mask=mask)
        )
    compare(name, tmp_path, batches=batches, train={"microbatches": 2}, data={"pack": "none"})


PACKED_LENGTHS = ((5, 3, 4), (12,), (2, 9, 1), (7, 5))


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_neox", "cohere2"]
)
def test_documents_in_one_sequence_are_exact_and_train_as_each_by_itself(name: str, tmp_path: Path):
    batch = make_batches(name, num_steps=1)[0]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in PACKED_LENGTHS])
    labels = batch.labels.masked_fill(positions == 0, IGNORED)
    batches = [Batch(batch.input_ids, labels, position_ids=positions)]
    got = compare(name, tmp_path, batches=batches, train={"microbatches": 2}, data={"pack": "documents"})
    model, loss = zoo.build(name), 0.0
    for row, lengths in enumerate(PACKED_LENGTHS):
        for part_ids, part_labels in zip(
            batch.input_ids[row].split(lengths), labels[row].split(lengths), strict=True
        ):
            one = Batch(part_ids[None], part_labels[None])
            if one.num_target_tokens:
                share = one.num_target_tokens / batches[0].num_target_tokens
                part = model(input_ids=one.input_ids, labels=one.labels).loss * share
                part.backward()
                loss += part.item()
    assert got.losses[0] == pytest.approx(loss, abs=1e-6)
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                got.gradients[0][parameter_name], parameter.grad, rtol=1e-5, atol=1e-6, msg=parameter_name
            )


# --- threads ------------------------------------------------------------------------------------------------


def wide_llama() -> Any:
    """Return a model large enough that torch splits its kernels."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def two_threads() -> Iterator[None]:
    with num_threads(2):
        yield


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_that_use_several_threads_are_exact(dtype: str, two_threads: None, tmp_path: Path):
    """Large enough that torch splits its kernels: each lane must split them as the main thread does."""
    batches = make_batches("llama", num_steps=2, num_sequences=4, seq_len=128)
    train = {"microbatches": 2, "loss": "chunked", "head_chunk_tokens": 300}
    compare_model(
        wide_llama(),
        batches,
        tmp_path,
        model={"dtype": dtype},
        train=train,
        memory={"home": "disk", "slots": 2},
    )


def test_a_number_of_threads_that_was_set_before_changes_no_bit(two_threads: None, tmp_path: Path):
    """Threads of OpenMP that have once computed as one of three go on so, until they are let go (test_openmp.py)."""
    torch.set_num_threads(3)  # and its threads are kept
    torch.ones(2048, 2048).sum(0)
    torch.set_num_threads(2)
    batches = make_batches("llama", num_steps=1, num_sequences=4, seq_len=128)
    compare_model(wide_llama(), batches, tmp_path, train={"microbatches": 2}, memory={"slots": 2})
