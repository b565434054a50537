"""A program of the user's own, named in the configuration: the same bits in another order of work, or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outsize.config import Config
from outsize.errors import ConfigError, OutsizeError, ProgramError
from outsize.planner.search.step_plan import Plan
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import make_run

PASSES = """
import random
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import Program, lane_of, parse, render

def mixed(text):
    '''Another order of the same ops: each lane keeps its own, and each op stays behind what it depends on.'''
    ops = parse(text).ops
    streamed = 1 + max(op.unit for op in ops if op.microbatch is not None)
    hazards = Hazards(streamed, streamed if any(op.unit == streamed for op in ops) else None)
    behind = [set(hazards.dependencies(op)) for op in ops]
    last = {}
    for index, op in enumerate(ops):
        places = [lane_of(op)] + [(op.unit, op.worker)] * (op.kind in ("LOAD", "FREE"))
        behind[index] |= {last[place] for place in places if place in last}
        last |= dict.fromkeys(places, index)
    draw, order, left = random.Random(7), [], list(range(len(ops)))
    while left:
        ready = [index for index in left if behind[index] <= set(order)][:2]
        order.append(draw.choice(ready))
        left.remove(order[-1])
    return render(Program(tuple(ops[index] for index in order)))

def unfreed(text):
    return "\\n".join(line for line in text.splitlines() if not line.startswith("FREE 1"))

def raising(text):
    raise LookupError("no such op")

def nothing(text):
    pass
"""
RUNS: dict[str, dict[str, Any]] = {
    "host": {},
    "in rounds": {"train": {"microbatches": 4, "round_microbatches": 2}},
    "from disk": {"memory": {"home": "disk"}},
    "by unit": {"optimizer": {"clip": "unit"}, "memory": {"home": "disk"}},
    "two workers": {"memory": {"device": "emulated:2"}},
    "LoRA": {"train": {"method": "lora"}},
}


def run(directory: Path, program: str, **sections: Any) -> Config:
    directory.mkdir(exist_ok=True)
    (directory / "passes.py").write_text(PASSES, encoding="utf-8")
    named = {"program": program.replace("passes.py", str(directory / "passes.py"))}
    return make_run(directory, **{**sections, "train": {**sections.get("train", {}), **named}})


@pytest.mark.parametrize("case", RUNS)
def test_another_order_of_work_has_the_bits_of_resident_training(case: str, tmp_path: Path) -> None:
    result = verify(run(tmp_path, "passes.py:mixed", **RUNS[case]))
    assert (result.equal, result.differing) == (True, [])


def test_a_run_walks_it_and_plan_json_replays_it(tmp_path: Path) -> None:
    own = train(run(tmp_path, "passes.py:mixed"))
    plans = [plain := make_run(tmp_path, train={"run_dir": str(tmp_path / "plain")})]
    plans.append(run(tmp_path, f"{own.run_dir}/plan.json", train={"run_dir": str(tmp_path / "again")}))
    results = [train(config) for config in plans]
    programs = [json.loads(Path(r.run_dir, "plan.json").read_text())["program"] for r in (own, *results)]
    assert programs[0] == programs[2] != programs[1]
    assert own.loss == results[0].loss == results[1].loss
    assert plain.train.program is None


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        ("passes.py:unfreed", ProgramError, "slots? still hold"),
        ("passes.py:nothing", ProgramError, "not an op: 'None'"),
        ("passes.py:raising", ConfigError, "failed: LookupError: no such op"),
        ("passes.py:absent", ConfigError, "has no function 'absent'"),
        ("absent.txt", ConfigError, "absent.txt holds no program: FileNotFoundError"),
    ],
)
def test_what_is_none_is_refused(
    program: str, error: type[OutsizeError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        verify(run(tmp_path, program))


def test_a_file_cannot_stand_for_programs_by_turns(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("CLIP")
    config = run(tmp_path, str(tmp_path / "one.txt"), memory={"device": "emulated:2"})
    with pytest.raises(ConfigError, match="programs by turns"):
        verify(config)


def test_another_order_of_sums_of_outer_parameters_is_refused(tmp_path: Path) -> None:
    """Backwards of two workers may change places, unless both add to the gradient of code around the units."""
    config = make_run(tmp_path, memory={"device": "emulated:2"}, train={"microbatches": 4})
    plan = prepare(RunSpec.of(config, tmp_path), lambda _: None).plan

    def early(text: str) -> str:
        """The first backward of the first worker before the other worker's second one, not behind its last."""
        lines = text.splitlines()
        if "RECV 1.0@w0" not in lines:  # the other turn, in which the workers have changed places
            return text
        moved = [lines.pop(lines.index(op)) for op in ("RECV 1.0@w0", "R 0.0@w0", "B 0.0@w0")]
        place = lines.index("SEND 1.0@w1") + 1
        return "\n".join([*lines[:place], *moved, *lines[place:]])

    def among(*users: int) -> Plan:
        return replace(plan, demand=replace(plan.demand, rest_users=frozenset(users))).walking(early)

    assert among().user_programs == among(0).user_programs != plan.programs
    with pytest.raises(ProgramError, match="in another order than"):
        among(0, 3)
