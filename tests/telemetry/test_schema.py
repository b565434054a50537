"""The form of a heartbeat line, in its three places: the model, the documentation, the JSON schema."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from outsize.telemetry.run_reading import SCHEMA_VERSION, Line
from outsize.training.records import StepRecord

ROOT = Path(__file__).parent.parent.parent


def test_the_documentation_is_what_the_schema_says():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "heartbeat_schema.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_record_has_the_fields_of_a_line():
    told = {field.name for field in fields(StepRecord)} | {"schema", "time", "tokens_per_s"}
    assert told == {field.alias or name for name, field in Line.model_fields.items()}


def test_every_field_is_described():
    assert all(field.description for field in Line.model_fields.values())


def line(**changes):
    record = StepRecord(step=1, loss=1.0, lr=1e-4, grad_norm=0.5, tokens=10, seconds=1.0)
    return {"schema": SCHEMA_VERSION, "time": 1.0, **record.to_dict(), **changes}


def test_a_line_is_read():
    assert Line.model_validate(line()).step == 1
    assert Line.model_validate(line(loss=None, mfu=0.5)).mfu == 0.5


@pytest.mark.parametrize(
    "wrong", [{"step": "1"}, {"unheard_of": 1}, {"seconds": -1.0}, {"busy_s": {"host": -1.0}}]
)
def test_a_line_of_another_form_is_refused(wrong):
    with pytest.raises(ValidationError):
        Line.model_validate(line(**wrong))
