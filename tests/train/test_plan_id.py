"""One decision: what is predicted, foreseen, verified and run has the same plan, by its id."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outsize.errors import InfeasiblePlanError
from outsize.hardware.cards import parse_gpus
from outsize.planner.predict.decision_search import decide
from outsize.planner.simulate.costs import UnitTimes
from outsize.session.decide import decide as module
from outsize.session.decide.rates import Rates
from outsize.session.job.job_options import options_for, question_for
from outsize.session.job.planning import question_of
from outsize.session.job.prepare import Job, prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import foresee
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import make_model_dir, make_run

LAYERS = 4
# Sections of a configuration, by what they are about.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "found microbatches": {"train": {"microbatches": None, "tokens_per_step": 8 * 16}},
    "bf16": {"model": {"dtype": "bf16"}},
    "lora": {"train": {"method": "lora"}, "model": {"dtype": "bf16"}, "transport": {"weights": "auto"}},
    "long": {"data": {"seq_len": 48}, "train": {"tokens_per_step": 4 * 48}},
    "unit clip": {"optimizer": {"clip": "unit"}},
    "int8": {"optimizer": {"state": "int8", "clip": "unit"}, "model": {"dtype": "bf16"}},
    "recompute": {"memory": {"activations": "recompute"}},
    "codecs": {"transport": {"weights": "auto", "gradients": "auto", "activations": "auto"}},
    "RMSprop": {"optimizer": {"name": "RMSprop"}},
    "products of Muon": {"optimizer": {"name": "muon", "ns_on": "device"}},
}
MACHINES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "cpu, disk": {"device": "cpu", "home": "disk"},
    "a device": {"device": "emulated:1", "link_gb_per_s": 100.0},
    "a device, any home": {"device": "emulated:1", "home": "auto", "link_gb_per_s": 0.001},
    "two": {"device": "emulated:2", "link_gb_per_s": 100.0, "peer_gb_per_s": 1.0},
    "eight": {"device": "emulated:8"},
}
NOT_OF_ALL = {("codecs", "cpu"), ("codecs", "cpu, disk"), ("lora", "cpu, disk")}
# Of each option two machines in three, and of each machine two options in three.
CASES = [
    (option, machine)
    for row, option in enumerate(OPTIONS)
    for column, machine in enumerate(MACHINES)
    if (row + column) % 3 and (option, machine) not in NOT_OF_ALL
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=LAYERS)


def configured(tmp_path: Path, model_dir: Path, options: str, machine: str) -> Any:
    sections = {name: dict(values) for name, values in OPTIONS[options].items()}
    sections["model"] = {**sections.get("model", {}), "path": str(model_dir)}
    sections["memory"] = {**MACHINES[machine], **sections.get("memory", {})}
    return make_run(tmp_path, **sections)


@pytest.fixture(autouse=True)
def _same_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever times this machine finds the same."""

    def measure_rates(prepared: Job, _: Path) -> Rates:
        count, workers, preset = (
            prepared.split.spec.num_streamed,
            prepared.machine.num_workers,
            parse_gpus("4090"),
        )
        figures = replace(preset, gpus=preset.gpus * workers, links=preset.links * workers)
        times = UnitTimes(forward_s=(1e-4,) * count, backward_s=(3e-4,) * count)
        return Rates(figures, times, microbatches=prepared.config.microbatches)

    monkeypatch.setattr(module, "measure_rates", measure_rates)
    monkeypatch.setattr(module, "codec_rates", lambda *_: None)
    monkeypatch.setattr(module, "crossing_rates", lambda *_: {})


def predicted_id(prepared: Job, rates: Rates | None) -> str:
    """The plan of `outsize plan` for the configuration, of which a trial and a clock have told demand and rates."""
    told = question_of(prepared, rates)
    config, spec = prepared.config, prepared.split.spec
    question = question_for(
        config,
        spec,
        told.machine,
        told.budgets,
        options_for(config, spec, num_workers=len(told.machine.gpus)),
        measured=told.measured,
        timed=told.timed,
        linked=told.linked,
        shares_memory=told.shares_memory,
    )
    return decide(question).plan.plan_id


@pytest.mark.parametrize(("options", "machine"), CASES)
def test_what_is_predicted_is_what_is_foreseen(
    options: str, machine: str, tmp_path: Path, model_dir: Path
) -> None:
    config = configured(tmp_path, model_dir, options, machine)
    prepared = prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None)
    decided, rates = module.choose_plan(prepared, lambda _: None)
    plan, *_ = foresee(config, predict=False)
    assert plan.plan_id == decided.plan.plan_id == predicted_id(prepared.following(config), rates)


def test_there_are_cases_enough() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize(
    ("options", "machine"), [("found microbatches", "two"), ("codecs", "a device"), ("lora", "cpu")]
)
def test_what_is_verified_and_what_runs_is_what_was_foreseen(
    options: str, machine: str, tmp_path: Path, model_dir: Path
) -> None:
    config = configured(tmp_path, model_dir, options, machine)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})})
    plan, _, *_ = foresee(config, predict=False)
    again = config.train.model_copy(update={"run_dir": str(tmp_path / "verified")})
    assert verify(config.model_copy(update={"train": again})).plan_id == plan.plan_id
    run_dir = Path(train(config).run_dir)
    assert json.loads((run_dir / "run.json").read_text())["plan_id"] == plan.plan_id


def test_an_id_is_of_what_is_done_and_not_of_what_there_would_be_room_for(tmp_path: Path) -> None:
    def plan_of(**memory: Any) -> Any:
        return prepare(RunSpec.of(make_run(tmp_path, memory=memory), tmp_path), lambda _: None).plan

    roomy = plan_of()
    assert plan_of(device_memory="2GiB").plan_id == roomy.plan_id
    assert plan_of(slots=1).plan_id != roomy.plan_id
    with pytest.raises(InfeasiblePlanError):
        plan_of(device_memory=1)
