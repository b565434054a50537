import json
import re
from pathlib import Path
from typing import Any

import pytest

import outsize
from tiny import tiny_run


@pytest.fixture
def model_json(tmp_path) -> Path:
    """A Llama of 0.7B parameters."""
    sizes = {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}))
    return path


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


def test_a_machine_with_a_switch_and_a_program_of_ones_own_are_predicted(tmp_path, model_json):
    """As docs/programs.md has it, whose code this runs."""
    box = tmp_path / "box.yaml"
    options = {"tokens_per_step": 16384, "home": "host", "resident": "none"}
    text = "gpus: 2x4090\nram: 256GB\n"
    box.write_text(text + "switches: {plx: {uplink: 3GB, gpus: [0, 1]}}")
    shared = outsize.predict(model_json, machine=str(box), **options)
    assert (
        shared.tokens_per_s < outsize.predict(model_json, gpus="2x4090", ram="256GB", **options).tokens_per_s
    )
    one = outsize.predict(model_json, gpus="4090", **options)
    assert one.simulate(one.program).step_s == pytest.approx(one.step_s)
    two = outsize.predict(model_json, gpus="2x4090", ram="256GB", **options)
    assert len(two.plan.programs) == 2  # which steps follow by turns
    assert two.simulate(lambda program: program).step_s == pytest.approx(two.step_s, rel=1e-3)
    with pytest.raises(outsize.ProgramError, match="2 programs by turns"):
        two.simulate(two.program)
    page = (Path(__file__).parent.parent / "docs" / "programs.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"re": re}
    exec(re.search(r"def loading_late.*?(?=```)", page, re.DOTALL)[0], names)  # type: ignore[index]
    for plan in (one, outsize.predict(model_json, gpus="4090", tokens_per_step=65536, home="host")):
        text = names["loading_late"](plan.program)
        assert plan.simulate(names["loading_late"]).step_s == plan.simulate(text).step_s
        assert sorted(text.splitlines()) == sorted(plan.program.splitlines())
        assert text != plan.program
        assert plan.simulate(text).step_s >= 0.99 * plan.simulate(plan.program).step_s
    with pytest.raises(outsize.ProgramError, match="-->"):
        one.simulate("\n".join(line for line in one.program.splitlines() if not line.startswith("FREE")))


def test_a_program_of_ones_own_has_the_memory_of_the_plan(model_json):
    """Inputs that leave the device in the plan have no room on it."""
    plan = outsize.predict(
        model_json,
        gpus="4090",
        tokens_per_step=65536,
        home="host",
        device_memory="1536MiB",
    )
    moves = ("SAVE", "FETCH")
    kept = [line for line in plan.program.splitlines() if not line.startswith(moves)]
    assert len(kept) < len(plan.program.splitlines())
    with pytest.raises(outsize.ProgramError, match=r"device holds .*, its budget is"):
        plan.simulate("\n".join(kept))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus: 4090\nvram: 24GB", "vram"),
        ("- 4090", "no keys"),
        ("gpus: 4090\nswitches: {plx: {uplink: 3GB, gpus: [1]}}", "no GPU 1 among 1"),
        ("gpus: 4090\nswitches: {plx: 3GB}", "switches.plx has uplink"),
        ("gpus: 4090\nswitches: {plx: {uplink: 3GB, gpus: 0}}", "switches.plx has uplink"),
        (
            "gpus: 4090\nswitches: {a: {uplink: 3GB, gpus: [0]}, b: {uplink: 3GB, gpus: [0]}}",
            "switches.b: GPU 0 is behind a already",
        ),
        ("gpus: 4090\ncpu_cores: many", "cpu_cores is a number, not 'many'"),
        ("gpus: 4090\nswitches: {plx: {uplink: fast, gpus: [0]}}", "not a rate: 'fast'"),
        ("gpus: [", "cannot read"),
        ("gpus: 4090\nswitches: [0, 1]", "switches is [0, 1]; write each by its name"),
        ("ram: 64GB", "box.yaml: it names no GPUs"),
        ("gpus: 4090\npinned: all", "box.yaml: pinned: "),
    ],
)
def test_a_machine_in_words_that_is_none_is_refused(text, says, tmp_path, model_json):
    box = tmp_path / "box.yaml"
    box.write_text(text)
    with pytest.raises(outsize.ConfigError, match=re.escape(says)):
        outsize.predict(model_json, machine=box)


def test_a_driver_that_pins_little_makes_links_as_slow_as_pageable_copies(tmp_path, model_json):
    """Figures by hand: of the 6 bytes of each parameter that cross, 1 pinned at 24.9 GB/s and 5 not at 8.3 are 9.35."""
    box, options = tmp_path / "box.yaml", {"tokens_per_step": 16384, "home": "host", "resident": "0"}
    model = outsize.predict(model_json, gpus="4090", ram="64GB", **options).decision.question.model
    crossing, rates = 6 * sum(unit.numel for unit in model.units), []
    for pinned in (2 * crossing, crossing // 6):
        box.write_text(f"gpus: 4090\nram: 64GB\npinned: {pinned} B\n")
        machine = outsize.predict(model_json, machine=box, **options).decision.question.machine
        rates.append(machine.links[0].up_bytes_per_s.value)
    assert rates[0] == pytest.approx(24.9e9, rel=0.01)
    assert rates[1] == pytest.approx(1 / (1 / 6 / rates[0] + 5 / 6 / 8.3e9), rel=1e-3)


def test_a_home_that_ends_on_disk_crosses_by_pinned_buffers(tmp_path, model_json):
    """What a driver pins of a home in host memory is nothing to one that has no room there."""
    box, steps = tmp_path / "box.yaml", []
    for pinned in ("", "pinned: 1 B"):
        box.write_text(f"gpus: 4090\nram: 8GB\ndisk: 1TB\n{pinned}\n")
        decision = outsize.predict(model_json, machine=box, tokens_per_step=16384).decision
        assert decision.plan.home == "disk"
        steps.append(decision.step_s)
    assert steps[0] == steps[1]


def test_what_is_given_comes_before_what_a_file_says(tmp_path, model_json):
    box = tmp_path / "box.yaml"
    box.write_text("gpus: 4090\nram: 1GB")
    options = {"tokens_per_step": 16384, "home": "host"}
    given = outsize.predict(model_json, machine=box, ram="256GB", resident=0, **options)
    plain = outsize.predict(model_json, gpus="4090", ram="256GB", resident="0", **options)
    assert given.tokens_per_s == plain.tokens_per_s
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{path: {model_json}}}\ndata: {{path: d, seq_len: 1024}}\ntrain: {{tokens_per_step: 8192, steps: 2}}"
    )
    kept = outsize.predict(run, gpus="4090", ram="256GB", tokens_per_step=16384)
    files = outsize.predict(run, gpus="4090", ram="256GB")
    assert [round(one.tokens_per_s * one.step_s) for one in (kept, files)] == [16384, 8192]


def test_what_only_prints_is_refused(model_json):
    with pytest.raises(outsize.ConfigError, match="compare, full: what outsize plan prints"):
        outsize.predict(model_json, gpus="4090", full=True, compare=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"machine": {"gpus": "4090"}}, "machine: a file or an outsize Machine, not {'gpus': '4090'}"),
        ({"gpus": 4090}, "gpus=4090: it should be a valid string, as --gpus"),
        ({"gpus": "4090", "seq_len": "x"}, "seq_len='x': it should be a valid integer, as --seq-len"),
        ({"gpus": "4090", "ram": 64}, "ram=64: it should be"),
        (
            {"gpus": "4090", "kernels": "fast"},
            "kernels='fast': it should be 'eager', 'fused' or 'liger'",
        ),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_name(model_json, options, says):
    with pytest.raises(outsize.ConfigError, match=re.escape(says)):
        outsize.predict(model_json, **options)


def test_an_option_that_there_is_not_is_refused(model_json):
    with pytest.raises(outsize.ConfigError, match="did you mean gpus"):
        outsize.predict(model_json, gpu="4090")
