"""A loss of the user's own, named in the configuration: streamed as resident, and in the place of the model's."""

from pathlib import Path
from typing import Any

import pytest

from outsize.config import Config
from outsize.errors import ConfigError, ModelError
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import make_run

LOSSES = """
from torch.nn.functional import cross_entropy

def plain(logits, labels):
    return cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)).float(), labels[:, 1:].reshape(-1))

def smoothed(logits, labels):
    flat = logits[:, :-1].reshape(-1, logits.size(-1)).float()
    return cross_entropy(flat, labels[:, 1:].reshape(-1), label_smoothing=0.1)
"""
RUNS: dict[str, dict[str, Any]] = {
    "from disk": {"memory": {"home": "disk"}},
    "two workers": {"memory": {"device": "emulated:2"}},
    "LoRA": {"train": {"method": "lora"}},
}


def run(directory: Path, name: str, **sections: Any) -> Config:
    directory.mkdir(exist_ok=True)
    (directory / "losses.py").write_text(LOSSES, encoding="utf-8")
    named = {"loss_function": f"{directory / 'losses.py'}:{name}"}
    return make_run(directory, **{**sections, "train": {**sections.get("train", {}), **named}})


@pytest.mark.parametrize("case", RUNS)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    result = verify(run(tmp_path, "smoothed", **RUNS[case]))
    assert (result.equal, result.differing) == (True, [])


def test_the_model_s_loss_under_another_name_is_the_same_loss(tmp_path: Path) -> None:
    own = train(run(tmp_path / "own", "plain"))
    model = train(make_run(tmp_path / "model", train={"loss": "model"}))
    other = train(run(tmp_path / "other", "smoothed"))
    assert own.loss == pytest.approx(model.loss, abs=1e-6)
    assert other.loss > own.loss


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("losses.py", "FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("absent.py:loss", "absent.py cannot be loaded"),
        ("no_such_module:loss", "no_such_module cannot be loaded"),
        ("math:absent", "math has no function 'absent'"),
    ],
)
def test_a_function_that_is_not_there_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_run(tmp_path, train={"loss_function": name}))


def test_a_model_that_takes_its_loss_otherwise_is_refused(tmp_path: Path) -> None:
    named = run(tmp_path, "plain").train.loss_function
    (tmp_path / "other").mkdir()
    with pytest.raises(ModelError, match="DistilBertForMaskedLM takes its loss otherwise"):
        train(make_run(tmp_path / "other", "distilbert", train={"loss_function": named}))
