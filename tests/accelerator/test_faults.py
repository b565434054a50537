"""A device that fails ends a run in one clear error: nothing hangs, what was committed stays, and the run goes on."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerator import late
from devices import IS_MADE_UP
from outsize.config import Config
from outsize.errors import ExecutionError
from outsize.training.records import StepRecord
from outsize.training.run import train
from support import assert_same_end, in_dir, make_model_dir, make_run

pytestmark = [
    pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late"),
    pytest.mark.filterwarnings("default"),
]
TOLD = {
    "kernel": "device-side assertion in a kernel",
    "loss": "the device is lost",
    "allocation": r"late:0 is out of memory: torch has reserved .* lower memory.device_memory.*late out of memory",
}
# A step of these runs has hundreds of kernels and allocations, so each of these falls into the last one, or into the
# end of the second.
FEW = [(what, 7) for what in TOLD]
MANY = list(itertools.product(TOLD, range(0, 68, 4)))  # of each home: 102


@pytest.fixture(autouse=True)
def no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what such a small run takes is to measure how long it will take."""
    monkeypatch.setattr("outsize.training.run.forecast", lambda *asked: None)


@pytest.fixture(scope="module", params=["host", "disk"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that nothing befell: what all others have to come to."""
    directory = tmp_path_factory.mktemp(request.param)
    make_model_dir(directory / "model", num_hidden_layers=2)
    memory = {"device": "late:0", "home": request.param, "slots": 2}
    config = make_run(directory, memory=memory, train={"steps": 3, "save_every": 1})
    train(config)
    return config


def striking(what: str, after: int) -> Callable[[StepRecord], None]:
    """Return what has something go wrong once the loss of the second step is known.

    The weights of the second step are computed from those after the first, so all of the first one is done by then. The
    end of the second one, its last gradients and weights, may still be under way.
    """

    def progress(record: StepRecord) -> None:
        if record.step == 2:
            late.strike(0, what, after)

    return progress


def fail_and_go_on(whole: Config, directory: Path, what: str, after: int) -> None:
    with pytest.raises(ExecutionError, match=TOLD[what]):
        train(in_dir(whole, directory), progress=striking(what, after))
    assert late.heal() == (what != "allocation")
    records: list[object] = []
    train(in_dir(whole, directory, resume="auto"), progress=records.append)
    assert len(records) <= 2  # the first step at least was kept
    assert_same_end(Path(whole.train.run_dir), directory)


@pytest.mark.parametrize(("what", "after"), FEW)
def test_a_fault_costs_no_committed_step(what: str, after: int, whole: Config, tmp_path: Path):
    fail_and_go_on(whole, tmp_path, what, after)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "after"), MANY)
def test_no_fault_of_a_campaign_does(what: str, after: int, whole: Config, tmp_path: Path):
    fail_and_go_on(whole, tmp_path, what, after)
