"""How a trained unit lies at home changes no bit where it says so: streamed equals resident, resumed equals whole."""

from pathlib import Path
from typing import Any

import pytest

import zoo
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.errors import ConfigError, StorageError
from outsize.native import library
from outsize.session.job import optimizer_layout
from outsize.session.job.prepare import prepare
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import plan
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import assert_same_end, in_dir, make_run
from tiny import tiny_model

SPLIT: dict[str, Any] = {"masters": "split"}
SPLIT24: dict[str, Any] = {"masters": "split24"}
SEPARATE: dict[str, Any] = {"masters": "separate"}
RING = {"clip": "unit", "max_grad_norm": 0.05}
EMULATED = {"device": "emulated:1"}
DISK = {"home": "disk"}
BF16 = {"dtype": "bf16"}
# What is trained, how it lies at home and where that is; each is exact.
EXACT: dict[str, dict[str, Any]] = {
    "split on disk": {"model": BF16, "optimizer": SPLIT, "memory": DISK},
    "split on disk below another device": {"model": BF16, "optimizer": SPLIT, "memory": {**DISK, **EMULATED}},
    "split, by unit, over two workers and the disk": {
        "model": BF16,
        "optimizer": {**RING, **SPLIT},
        "memory": {**DISK, "device": "emulated:2"},
    },
    "by unit, split": {"model": BF16, "optimizer": {**RING, **SPLIT}},
    "by unit, split, on disk": {"model": BF16, "optimizer": {**RING, **SPLIT}, "memory": DISK},
    "by unit, on disk below another device": {"optimizer": RING, "memory": {**DISK, **EMULATED}},
    "by unit over two workers": {"optimizer": RING, "memory": {"device": "emulated:2"}},
    "not clipped": {"optimizer": {"clip": "none"}, "memory": EMULATED},
    "not clipped, on disk": {"optimizer": {"max_grad_norm": 0.0}, "memory": DISK},
    "gradients in bf16": {"optimizer": {"gradients": "bf16"}, "memory": EMULATED},
    "gradients in bf16, split, on disk": {
        "model": BF16,
        "optimizer": {**SPLIT, "gradients": "bf16"},
        "memory": DISK,
    },
    "gradients in bf16 on disk below another device": {
        "optimizer": {"gradients": "bf16"},
        "memory": {**DISK, **EMULATED},
    },
    # Lossy, and with fp32 moments by the bits of a resident run that rounds its masters.
    "24 bits": {"model": BF16, "optimizer": SPLIT24},
    "24 bits on disk below another device": {
        "model": BF16,
        "optimizer": SPLIT24,
        "memory": {**DISK, **EMULATED},
    },
    "24 bits, by unit, over two workers": {
        "model": BF16,
        "optimizer": {**RING, **SPLIT24},
        "memory": {"device": "emulated:2"},
    },
    "24 bits, SGD, by unit": {"model": BF16, "optimizer": {**RING, **SPLIT24, "name": "SGD"}},
    "24 bits, Adafactor, on disk": {
        "model": BF16,
        "optimizer": {**SPLIT24, "name": "Adafactor"},
        "memory": DISK,
    },
    "24 bits, Muon": {"model": BF16, "optimizer": {**SPLIT24, "name": "muon"}},
}


@pytest.mark.parametrize("case", EXACT)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    result = verify(make_run(tmp_path, **EXACT[case]))
    assert (result.equal, result.differing) == (True, [])


def test_a_weight_that_units_share_waits_for_all_of_them(tmp_path: Path) -> None:
    """The rest takes part in every backward, and steps once the last has run."""
    run = make_run(tmp_path, "llama_tied", train={"microbatches": 2}, optimizer=RING, memory=EMULATED)
    result = verify(run)
    assert (result.equal, result.differing) == (True, [])


# A run begun with one and gone on with the other.
OTHER_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "separate, then split": ({"optimizer": SEPARATE}, {"optimizer": SPLIT}),
    "split on disk, then separate": ({"optimizer": SPLIT, "memory": DISK}, {"optimizer": SEPARATE}),
    "split, by ring over the host, then over the disk": (
        {"optimizer": {**SPLIT, "max_grad_norm": 0.0}},
        {"optimizer": {**SPLIT, "max_grad_norm": 0.0}, "memory": DISK},
    ),
}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_a_checkpoint_is_the_same_however_a_unit_lies_at_home(case: str, tmp_path: Path) -> None:
    first, second = ({"train": {"steps": 3}, "model": BF16, **sections} for sections in OTHER_LAYOUTS[case])
    train(in_dir(make_run(tmp_path, **first), tmp_path / "whole"))
    train(in_dir(make_run(tmp_path, **first), tmp_path / "parts", steps=2))
    train(in_dir(make_run(tmp_path, **second), tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


class _CrashError(Exception):
    """Ends a run as a crash would, for whoever looks at its files."""


def interrupted(config: Config, after: int) -> None:
    def stop(record: Any) -> None:
        if record.step == after:
            raise _CrashError

    with pytest.raises(_CrashError):
        train(config, progress=stop)


@pytest.mark.parametrize("name", ["split", "split, by ring"])
def test_a_home_on_disk_goes_on_from_its_last_commit(name: str, tmp_path: Path) -> None:
    optimizer = {**SPLIT, **(RING if "ring" in name else {})}
    config = make_run(tmp_path, model=BF16, optimizer=optimizer, memory=DISK)
    train(in_dir(config, tmp_path / "whole"))
    interrupted(in_dir(config, tmp_path / "parts"), 3)
    said: list[str] = []
    train(in_dir(config, tmp_path / "parts", resume="auto"), announce=said.append)
    assert any(line.startswith("resumed from step ") for line in said)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        (SEPARATE, "the state of a run with optimizer.masters=split"),
        ({**SPLIT, "max_grad_norm": 0.0}, r"a state that keeps fp32 gradients"),
    ],
)
def test_a_home_that_lies_otherwise_is_refused(changes: dict[str, Any], held: str, tmp_path: Path) -> None:
    config = make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=DISK)
    interrupted(in_dir(config, tmp_path / "run"), 3)
    other = make_run(tmp_path, model=BF16, optimizer=changes, memory=DISK)
    with pytest.raises(StorageError, match=f"home.bin holds {held}; resume with the former settings"):
        train(in_dir(other, tmp_path / "run", resume="auto"))


@pytest.mark.parametrize("kernels", [True, False])
def test_masters_of_bf16_are_split_by_themselves_where_kernels_step_them(
    kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels and not library.available():
        pytest.skip(f"no kernels: {library.reason()}")
    monkeypatch.setattr(library, "available", lambda: kernels)
    assert plan(make_run(tmp_path, model=BF16)).state.masters == ("split" if kernels else "separate")
    assert plan(make_run(tmp_path)).state.masters == "separate"
    # A torch whose AdamW rounds otherwise is followed in torch ops, which are slow over split masters.
    monkeypatch.setattr(optimizer_layout, "agrees_with_torch", lambda level: False)
    assert plan(make_run(tmp_path, model=BF16)).state.masters == "separate"


def test_small_tiles_keep_masters_separate_where_nobody_asks_for_others(tmp_path: Path) -> None:
    """Tiles of split masters are whole sectors of ties, too."""
    memory = {**DISK, "tile_elements": 4096}
    assert plan(make_run(tmp_path, model=BF16, memory=memory)).state.masters == "separate"
    with pytest.raises(ConfigError, match=r"memory\.tile_elements: 4096 is not a multiple of 32768"):
        plan(make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=memory))


@pytest.mark.parametrize("former", [SPLIT, SEPARATE])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_run_goes_on_with_masters_as_they_lie_at_home(
    former: dict[str, Any], kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a home on disk from before they were split by themselves, or of a machine that had other kernels."""
    if kernels and not library.available():
        pytest.skip(f"no kernels: {library.reason()}")
    config = make_run(tmp_path, model=BF16, optimizer=former, memory=DISK)
    train(in_dir(config, tmp_path / "whole"))
    interrupted(in_dir(config, tmp_path / "parts"), 3)
    monkeypatch.setattr(library, "available", lambda: kernels)  # and steps as it did
    said: list[str] = []
    auto = make_run(tmp_path, model=BF16, memory=DISK)
    train(in_dir(auto, tmp_path / "parts", resume="auto"), announce=said.append)
    assert any(line.startswith("resumed from step ") for line in said)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    fresh = plan(in_dir(auto, tmp_path / "another", resume="auto"))
    assert fresh.state.masters == ("split" if kernels else "separate")


def test_gradients_take_no_memory_at_home_unless_they_wait_for_a_norm(tmp_path: Path) -> None:
    kept, passing = (
        plan(make_run(tmp_path, model=BF16, optimizer={**SPLIT, **changes}))
        for changes in ({}, {"clip": "unit"})
    )
    numel = sum(bytes_ // 4 for bytes_ in kept.layout.gradient_bytes)
    assert kept.memory["host"]["home"] - passing.memory["host"]["home"] == 4 * numel
    assert passing.memory["host"]["home"] == numel * 12 + sum(
        max(4096, -(-bytes_ // 32 // 4096) * 4096) for bytes_ in passing.layout.gradient_bytes
    )
    assert "gradient ring" in passing.memory["host"]
    assert "gradient ring" not in kept.memory["host"]


def test_masters_of_other_weights_than_bf16_are_not_split(tmp_path: Path) -> None:
    run = make_run(tmp_path, model={"dtype": "auto"}, optimizer=SPLIT)
    with pytest.raises(ConfigError, match=r"optimizer\.masters: only those of bf16 weights"):
        plan(run)


def test_fp16_cannot_be_clipped_by_unit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.clip: unit steps a unit before"):
        plan(make_run(tmp_path, model={"dtype": "fp16"}, optimizer=RING))


# Moments in fewer bits do not depend on where they lie or how they are cut either.
LOSSY: dict[str, dict[str, Any]] = {
    "int8, global norm": {"model": BF16, "optimizer": {"state": "int8"}},
    "int8, ring": {"model": BF16, "optimizer": {"state": "int8", **RING}},
    "bf16, ring, fp32 weights": {"optimizer": {"state": "bf16", **RING}},
    "int8 beside masters of 24 bits, ring": {
        "model": BF16,
        "optimizer": {"state": "int8", **SPLIT24, **RING},
    },
}


@pytest.mark.parametrize("case", LOSSY)
def test_fewer_bits_are_the_same_wherever_they_lie(case: str, tmp_path: Path) -> None:
    """Over a host home, tile by tile over a disk, from a commit, and from a checkpoint into another home."""
    sections = LOSSY[case]
    train(in_dir(make_run(tmp_path, **sections), tmp_path / "host"))
    on_disk = make_run(tmp_path, **sections, memory=DISK)
    interrupted(in_dir(on_disk, tmp_path / "disk"), 2)
    train(in_dir(on_disk, tmp_path / "disk", resume="auto", steps=3))
    train(in_dir(make_run(tmp_path, **sections, memory=EMULATED), tmp_path / "disk", resume="auto"))
    assert_same_end(tmp_path / "host", tmp_path / "disk")


def test_moments_in_other_bits_are_another_run(tmp_path: Path) -> None:
    train(in_dir(make_run(tmp_path, optimizer={"state": "int8"}), tmp_path / "run", steps=1))
    with pytest.raises(ConfigError, match=r"belongs to a run with optimizer\.state=int8, not fp32"):
        train(in_dir(make_run(tmp_path), tmp_path / "run", resume="auto"))


@pytest.mark.parametrize(
    ("former", "given", "told"),
    [
        (SPLIT24, {}, "split24, not auto"),
        (SPLIT24, SPLIT, "split24, not split"),
        (SPLIT, SPLIT24, "auto, not split24"),
    ],
)
@pytest.mark.parametrize("memory", [{}, DISK])
def test_masters_in_other_bits_are_another_run(
    former: dict[str, Any], given: dict[str, Any], told: str, memory: dict[str, Any], tmp_path: Path
) -> None:
    """Of a checkpoint as of a home that commits."""
    run = in_dir(make_run(tmp_path, model=BF16, optimizer=former, memory=memory), tmp_path / "run")
    if memory:
        interrupted(run, 2)
    else:
        train(in_dir(run, tmp_path / "run", steps=1))
    other = make_run(tmp_path, model=BF16, optimizer=given, memory=memory)
    with pytest.raises(ConfigError, match=rf"belongs to a run with optimizer\.masters={told}"):
        train(in_dir(other, tmp_path / "run", resume="auto"))


def test_a_run_says_at_its_start_what_loses_bits(tmp_path: Path) -> None:
    said: dict[str, list[str]] = {}
    for name, optimizer in {"lossy": {**SPLIT24, "state": "int8"}, "exact": SPLIT}.items():
        run = make_run(tmp_path, model=BF16, train={"steps": 1}, optimizer=optimizer)
        train(in_dir(run, tmp_path / name), announce=said.setdefault(name, []).append)
    note = "note: not bit-exact, since rounded by chance: moments in int8 and masters in 24 bits"
    assert note in said["lossy"]
    assert not any("bit-exact" in line for line in said["exact"])


def wide_model(directory: Path) -> Path:
    """A Llama of a million parameters: large enough that whole sectors weigh nothing."""
    return tiny_model(directory, hidden_size=192, intermediate_size=512, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("bytes_per_parameter", "optimizer"),
    [
        (5.5, {"state": "int8", "masters": "split24", "clip": "unit"}),
        (6.5, {"state": "int8", "clip": "unit"}),
        (14.5, {"masters": "split", "clip": "unit"}),
    ],
)
def test_a_budget_of_so_many_bytes_per_parameter_holds(
    bytes_per_parameter: float, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, masters, moments, gradients on their way and saved inputs: the ledger lets no more be taken."""
    wide_model(tmp_path / "model")
    train_config = {"steps": 2, "tokens_per_step": 32, "microbatches": 1}
    run = make_run(tmp_path, model=BF16, train=train_config, optimizer=optimizer, memory=EMULATED)
    prepared = prepare(RunSpec.of(run, tmp_path), lambda _: None)
    budget = int(bytes_per_parameter * prepared.split.spec.num_parameters)
    memory = run.memory.model_copy(update={"host_memory": budget})
    prepared = prepare(RunSpec.of(run.model_copy(update={"memory": memory}), tmp_path), lambda _: None)
    with StreamedTrainer(prepared, tmp_path / "store") as trainer:
        trainer.fill()
        batch = Batch(**zoo.batch("llama", seed=1, num_sequences=2, seq_len=16))
        outcomes = list(trainer.steps([batch, batch]))
        trainer.settle()
        assert 0.9 * budget < trainer.ledger.used("host") <= budget
    assert outcomes[1].loss < outcomes[0].loss


def test_a_step_clipped_by_unit_reports_the_global_norm(tmp_path: Path) -> None:
    norms: dict[str, list[float]] = {}
    for clip in ("global", "unit"):
        run = make_run(tmp_path, train={"steps": 1}, optimizer={"clip": clip, "max_grad_norm": 0.05})
        noted = norms.setdefault(clip, [])
        train(
            in_dir(run, tmp_path / clip),
            progress=lambda record, into=noted: into.append(record.grad_norm),
        )
    assert norms["unit"] == pytest.approx(norms["global"], rel=1e-6)
    assert norms["global"][0] > 0.05


def test_verify_says_that_rounded_moments_differ_and_by_how_much(tmp_path: Path) -> None:
    said: list[str] = []
    result = verify(make_run(tmp_path, optimizer={"state": "int8"}), announce=said.append)
    assert any(line.startswith("note: moments in int8 are rounded") for line in said)
    assert not result.equal
    assert result.loss_streamed[:1] == result.loss_resident[:1]
    assert result.loss_streamed == pytest.approx(result.loss_resident, rel=1e-3)
