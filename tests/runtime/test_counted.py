"""Counted without weights, held to what a run measures on the model itself, and to what configs of families tell."""

import pytest

import zoo
from outsize.config import parse_config
from outsize.model.build import build_skeleton
from outsize.model.sizes.lora_from_config import adapted_workload, with_adapters, with_frozen
from outsize.model.sizes.spec_from_config import read_shape, spec_from_config
from outsize.model.sizes.workload import count_workload
from outsize.model.walk import Boundaries
from outsize.session.job import prepare
from outsize.session.job.counted_model import count_model

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
    counted = count_model(config, run)
    work = counted.workload_of(SEQUENCES, SEQ_LEN)
    parts = prepare.split_model(build_skeleton(config, "bf16"), "bf16", run)
    with Boundaries(parts.modules) as boundaries:
        measured = prepare._measure(run, config, parts, boundaries, lambda _: None, num_ranks=1)[0]
    assert counted.spec == parts.spec
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


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral"])
def test_sizes_from_the_configs_of_families_are_what_is_counted(name):
    """Enough tokens that the routers of mixtures do not weigh."""
    config = config_of(name)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "moe_intermediate_size": 256}
    for key, value in {**sizes, "sliding_window": 4096, "shared_expert_intermediate_size": 256}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    counted = count_model(config, run_of("bf16"))
    shape = read_shape(config.to_dict())
    spec, told = (
        spec_from_config(config.to_dict(), "bf16"),
        count_workload(shape, "bf16", sequences=SEQUENCES, seq_len=SEQ_LEN),
    )
    work = counted.workload_of(SEQUENCES, SEQ_LEN)
    assert spec.num_parameters == counted.spec.num_parameters
    assert [unit.kind for unit in spec.units] == [unit.kind for unit in counted.spec.units]
    assert told.boundary_bytes[1:] == work.boundary_bytes[1:]
    assert told.forward_flops[1:] == pytest.approx(work.forward_flops[1:], rel=0.02)
    assert told.gradient_flops[1:] == pytest.approx(work.gradient_flops[1:], rel=0.1)
    assert told.saved_bytes[1:] == pytest.approx(work.saved_bytes[1:], rel=WITHIN)
    assert told.routed_flops == pytest.approx(work.routed_flops, rel=0.02)


def test_what_is_frozen_has_no_gradient_of_its_weights_and_below_what_trains_none_at_all():
    config = config_of("gpt2")
    first, *blocks = (f"transformer.h.{layer}.*" for layer in range(config.n_layer))
    ends = ("transformer.wte.*", "transformer.wpe.*", "transformer.ln_f.*")
    works = [
        count_model(config, run_of("fp32", freeze)).workload_of(SEQUENCES, SEQ_LEN)
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


def test_adapters_take_the_backward_that_configs_of_families_tell():
    config = config_of("llama")
    for key, value in {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}.items():
        setattr(config, key, value)
    run = run_of("bf16", method="lora")
    spec = with_adapters(spec_from_config(config.to_dict(), "bf16"), run.lora.r, ("q_proj", "v_proj"))
    shape = with_frozen(read_shape(config.to_dict()), spec)
    told = adapted_workload(count_workload(shape, "bf16", sequences=SEQUENCES, seq_len=SEQ_LEN), spec)
    work = count_model(config, run).workload_of(SEQUENCES, SEQ_LEN)
    assert told.gradient_flops[1:] == pytest.approx(work.gradient_flops[1:], rel=WITHIN)
