import pytest

import outsize
from tiny import tiny_run


def test_a_run_from_plan_to_export_by_functions_alone(tmp_path):
    """Each function does what its command does: planned, verified, trained, shown and exported from one mapping."""
    config = tiny_run(tmp_path / "run", train={"steps": 2})
    planned = outsize.plan(config)
    assert planned.plan_id == outsize.verify(config.model_dump(mode="json")).plan_id
    trained = outsize.train(config)
    assert trained.steps == 2
    page = outsize.report(trained.run_dir)
    assert page.name == "report.html"
    assert "<html" in page.read_text(encoding="utf-8")
    exported = outsize.export(trained.run_dir, tmp_path / "model")
    assert (exported / "config.json").is_file()


def test_a_run_is_said_as_a_file_too(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {stepz: 3}")
    with pytest.raises(outsize.ConfigError, match="stepz"):
        outsize.plan(file)
