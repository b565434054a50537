"""Several workers end bit for bit where one resident model ends, on Hugging Face architectures."""

from pathlib import Path
from typing import Any

import pytest

from outsize.errors import ConfigError, InfeasiblePlanError, ModelError
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import make_model_dir, make_run
from test_exactness import compare


def on(num_workers: int, **memory: Any) -> dict[str, Any]:
    return {"device": f"emulated:{num_workers}", **memory}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_families(name: str, num_workers: int, clip: float, tmp_path: Path):
    make = {"train": {"microbatches": 4}, "optimizer": {"max_grad_norm": clip}}
    got = compare(name, tmp_path, memory=on(num_workers), **make)
    assert got.plan.layout.num_workers == num_workers
    assert {op.worker for op in got.plan.program if op.microbatch is not None} == set(range(num_workers))


@pytest.mark.parametrize(("count", "num_workers"), [(1, 2), (1, 4), (2, 3), (3, 2), (4, 3)])
def test_microbatches(count: int, num_workers: int, tmp_path: Path):
    compare("llama", tmp_path, train={"microbatches": count}, memory=on(num_workers))


@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "bloom"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_tied_embeddings_are_those_of_a_resident_run_that_sums_use_by_use(
    name: str, clip: float, tmp_path: Path
):
    config = make_run(
        tmp_path, name, memory=on(2), train={"microbatches": 4, "steps": 2}, optimizer={"max_grad_norm": clip}
    )
    result = verify(config)
    assert (result.equal, result.differing) == (True, [])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_low_precision(name: str, dtype: str, tmp_path: Path):
    compare(name, tmp_path, model={"dtype": dtype}, train={"microbatches": 4}, memory=on(3))


@pytest.mark.parametrize("freeze", [("*embed_tokens*",), ("*embed_tokens*", "*layers.0.*", "*layers.1.*")])
def test_frozen_prefixes(freeze: tuple[str, ...], tmp_path: Path):
    model = {"freeze": freeze}
    compare("llama", tmp_path, model=model, train={"microbatches": 4}, memory=on(2))


def test_a_frozen_embedding_that_the_model_scales(tmp_path: Path):
    model = {"freeze": ("*embed_tokens*",)}
    compare("gemma2", tmp_path, model=model, train={"microbatches": 2}, memory=on(2))


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_dropout_draws_what_one_worker_draws(name: str, tmp_path: Path):
    compare(name, tmp_path, dropout=0.2, train={"microbatches": 4}, memory=on(3))


def test_a_chunked_loss(tmp_path: Path):
    sections = {"train": {"microbatches": 4, "loss": "chunked", "head_chunk_tokens": 5}}
    assert compare("llama", tmp_path, memory=on(3), **sections).chunk_tokens == 5


@pytest.mark.parametrize("pack", ["none", "documents"])
def test_padding_and_masks(pack: str, tmp_path: Path):
    config = make_run(tmp_path, memory=on(2), data={"pack": pack}, train={"microbatches": 2, "steps": 2})
    assert verify(config).equal


def test_throttled_links_change_no_bit(tmp_path: Path):
    memory = on(2, link_gb_per_s=0.01)
    assert verify(make_run(tmp_path, memory=memory, train={"microbatches": 4, "steps": 2})).equal


def moves(got: Any) -> set[str]:
    return {op.kind.value for op in got.plan.program}


@pytest.mark.parametrize(
    ("num_workers", "sections"),
    [
        (2, {"train": {"microbatches": 4}}),
        (3, {"train": {"microbatches": 3}, "optimizer": {"max_grad_norm": 0.05}}),
        (4, {"train": {"microbatches": 4}, "model": {"dtype": "bf16"}}),
        (
            3,
            {
                "train": {"microbatches": 4},
                "model": {"freeze": ("*embed_tokens*", "*layers.0.*", "*layers.1.*")},
            },
        ),
    ],
)
def test_copies_from_device_to_device_change_no_bit(
    num_workers: int, sections: dict[str, Any], tmp_path: Path
):
    sections = {"parallel": {"handover": "peer"}, **sections}
    got = compare("llama", tmp_path, memory=on(num_workers, peer_gb_per_s=0.05), **sections)
    assert moves(got) >= {"PASS", "RETURN"}
    assert not moves(got) & {"SEND", "RECV"}


def test_copies_from_device_to_device_of_a_mixture_whose_inputs_are_encoded_below(tmp_path: Path):
    sections = {"parallel": {"handover": "peer"}, "transport": {"activations": "lossless4"}}
    memory = on(2, peer_gb_per_s=1.0)
    got = compare("qwen3_moe", tmp_path, memory=memory, train={"microbatches": 4}, **sections)
    assert "PASS" in moves(got)


def test_tied_embeddings_and_what_forwards_keep_go_with_copies_between_devices(tmp_path: Path):
    memory = on(3, peer_gb_per_s=1.0, activations="offload-products")
    config = make_run(tmp_path, "llama_tied", memory=memory, train={"microbatches": 4, "steps": 2})
    assert verify(config).equal


@pytest.mark.parametrize("halves", [(2, 1), (1, 1)])
def test_one_set_of_slots_and_accumulators_changes_no_bit(
    halves: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("outsize.planner.search.plan_stages.HALVES", (halves,))
    got = compare("llama", tmp_path, memory=on(2), train={"microbatches": 4})
    stages = got.plan.layout.stages
    assert stages is not None
    assert (stages.slot_halves, stages.accumulator_halves) == halves


def test_a_run_ends_where_one_worker_ends_and_resumes_there(tmp_path: Path):
    """Four steps on one worker; two on three workers, and two more on two of them from what was saved."""
    sections: dict[str, Any] = {"optimizer": {"warmup_steps": 1}}

    def run(directory: str, memory: dict[str, Any], steps: int) -> float:
        settings = {"steps": steps, "microbatches": 4, "resume": "auto", "run_dir": str(tmp_path / directory)}
        return train(make_run(tmp_path, memory=memory, train=settings, **sections)).loss

    assert run("several", on(3), 2) == run("one", {}, 2)
    assert run("several", on(2), 4) == run("one", {}, 4)


def test_more_workers_than_stages(tmp_path: Path):
    make_model_dir(tmp_path / "model", num_hidden_layers=1)
    config = make_run(tmp_path, memory=on(6))
    with pytest.raises(
        ConfigError, match="6 devices, but 3 units make at most 5 stages; use at most 5 devices"
    ):
        prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None)


@pytest.mark.parametrize(
    ("name", "num_workers", "sections"),
    [
        ("llama", 2, {"train": {"microbatches": 4}, "optimizer": {"max_grad_norm": 0.05}}),
        ("llama", 3, {"train": {"microbatches": 3}, "optimizer": {"max_grad_norm": 0.0}}),
        ("qwen3_moe", 2, {"train": {"microbatches": 2}, "model": {"dtype": "bf16"}}),
    ],
)
def test_a_home_on_disk(name: str, num_workers: int, sections: dict[str, Any], tmp_path: Path):
    got = compare(name, tmp_path, memory=on(num_workers, home="disk"), **sections)
    assert got.plan.layout.staged
    assert got.plan.home == "disk"


def test_tied_embeddings_over_a_home_on_disk(tmp_path: Path):
    """The gradient of the table goes to disk and comes back between the visits that add to it."""
    memory = on(2, home="disk", link_gb_per_s=0.05)
    config = make_run(tmp_path, "llama_tied", memory=memory, train={"microbatches": 4, "steps": 2})
    assert verify(config).equal


def test_several_workers_go_on_from_a_home_on_disk_that_one_has_committed(tmp_path: Path):
    def run(directory: str, memory: dict[str, Any], steps: int) -> float:
        settings = {"steps": steps, "microbatches": 4, "resume": "auto", "run_dir": str(tmp_path / directory)}
        return train(make_run(tmp_path, memory={"home": "disk", **memory}, train=settings)).loss

    assert run("several", on(2), 2) == run("one", {}, 2)
    assert run("several", {}, 4) == run("one", on(2), 4)


@pytest.mark.parametrize(
    ("memory", "tier", "advice"),
    [
        ({"device_memory": "64KiB"}, "device", "on each device, .* first try"),
        ({"host_memory": "64KiB", "home": "host"}, "host", "on the host, .* first try the home on disk"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_done(
    memory: dict[str, Any], tier: str, advice: str, tmp_path: Path
):
    with pytest.raises(InfeasiblePlanError, match=advice) as raised:
        prepare(RunSpec.of(make_run(tmp_path, memory=on(2, **memory)), tmp_path / "run"), lambda _: None)
    assert raised.value.short_by[tier] > 0


def test_budgets_are_those_of_each_worker(tmp_path: Path):
    """Less memory gives smaller stages, and the same bits."""
    roomy = prepare(RunSpec.of(make_run(tmp_path, memory=on(2)), tmp_path / "run"), lambda _: None)
    needed = roomy.plan.total_bytes("device")
    tight = make_run(tmp_path, memory=on(2, device_memory=needed - 1), train={"microbatches": 4, "steps": 2})
    prepared = prepare(RunSpec.of(tight, tmp_path / "run"), lambda _: None)
    assert prepared.plan.total_bytes("device") < needed
    assert verify(tight).equal


def test_units_with_a_state_of_their_own_are_refused_on_several_devices(tmp_path: Path):
    with pytest.raises(
        ModelError, match="of which each of several devices would have another: use one device"
    ):
        verify(make_run(tmp_path, "recurrent_gemma", memory=on(2)))
