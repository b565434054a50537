"""Counted without weights, held to what a run measures on the model itself."""

from pathlib import Path

import pytest

import zoo
from counting import counted
from outsize.config import parse_config
from outsize.model.build import build_skeleton
from outsize.model.walk import Boundaries
from outsize.runtime.trial.measured import KnownRows
from outsize.session.job import prepare
from outsize.session.job.model_setup import split_model
from outsize.streamed.spec import RunSpec

SEQUENCES, SEQ_LEN = 2, 512
WITHIN = 0.1
# Mixtures, latent attention, hybrids of attention and recurrence, windows, biases, position tables, an encoder.
NAMES = (
    *("gpt2", "gemma2", "gemma3_text", "phi3", "glm4", "olmo2", "gpt_oss", "deepseek_v3", "qwen3_next"),
    *("granitemoe", "cohere2", "falcon", "opt", "bloom", "lfm2", "mamba2", "minimax", "bert"),
)


def run_of(dtype, freeze=(), method="full"):
    return parse_config(
        {
            "model": {"path": "unused", "dtype": dtype, "freeze": freeze},
            "data": {"path": "unused", "seq_len": SEQ_LEN},
            "train": {"tokens_per_step": SEQUENCES * SEQ_LEN, "method": method},
        }
    )


def config_of(name):
    config = zoo.ARCHITECTURES[name]()
    if hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = 2 * SEQ_LEN
    return config


def most(kinds, sizes, kind):
    return max(size for each, size in zip(kinds, sizes, strict=False) if each == kind)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_that_a_run_measures(name):
    config, run = config_of(name), run_of("bf16")
    counts = counted(config.to_dict(), seq_len=SEQ_LEN)
    work = counts.workload(SEQUENCES, SEQ_LEN)
    parts = split_model(build_skeleton(config, "bf16"), "bf16", run)
    with Boundaries(parts.modules) as boundaries:
        measured = prepare._measure(
            RunSpec.of(run, Path()), 1, config, parts, boundaries, KnownRows(), lambda _: None
        )[0]
    assert counts.spec == parts.spec
    assert work.boundary_bytes[1:] == measured.boundary_bytes[1:]
    assert work.saved_bytes[1:-1] == pytest.approx(measured.saved_bytes[1:-1], rel=WITHIN)
    kinds = [unit.kind for unit in parts.spec.units]
    for kind in ("embedding", "block"):
        assert work.backward_workspace_bytes[kind] == pytest.approx(
            most(kinds, measured.backward_bytes, kind), rel=WITHIN
        )
        # Less than what its backward needs, and counted without what kernels do in place.
        forward = most(kinds, measured.forward_bytes, kind)
        assert work.forward_workspace_bytes[kind] == pytest.approx(forward, rel=1.5 * WITHIN)
    assert work.held_bytes == pytest.approx(measured.held_bytes, rel=WITHIN)
    assert all(flops > 0 for flops in work.forward_flops[1:])


def test_what_is_frozen_has_no_gradient_of_its_weights_and_below_what_trains_none_at_all():
    config = config_of("gpt2")
    first, *blocks = (f"transformer.h.{layer}.*" for layer in range(config.n_layer))
    ends = ("transformer.wte.*", "transformer.wpe.*", "transformer.ln_f.*")
    works = [
        counted(config.to_dict(), "fp32", freeze=freeze, seq_len=SEQ_LEN).workload(SEQUENCES, SEQ_LEN)
        for freeze in ((), (*ends, first), (*ends, *blocks))
    ]
    forward = works[0].forward_flops
    _, *all_train, head = works[0].gradient_flops
    _, *one_frozen, frozen_head = works[1].gradient_flops
    assert one_frozen == [0, *all_train[1:]]
    assert (head, frozen_head) == (2 * forward[-1], forward[-1])
    _, *one_trains, _ = works[2].gradient_flops
    assert one_trains[0] == all_train[0]
    assert all(0 < one < more for one, more in zip(one_trains[1:], all_train[1:], strict=True))
