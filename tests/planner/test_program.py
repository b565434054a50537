from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import ProgramError
from outsize.planner.program.program import (
    Kind,
    Op,
    Program,
    excerpt,
    is_well_formed,
    parse,
    parse_op,
    render,
)
from outsize.planner.program.table import FORMS, ROWS

numbers = st.integers(0, 10**6)


@st.composite
def any_op(draw: st.DrawFn) -> Op:
    kind = draw(st.sampled_from(Kind))
    shape = draw(st.sampled_from(FORMS[kind])).fields
    return Op(kind=kind, **{name: draw(numbers) for name in sorted(shape)})


@given(st.lists(any_op()))
def test_what_is_rendered_parses_to_the_same_program(ops):
    program = Program(tuple(ops))
    assert parse(render(program)) == program
    assert parse(";".join(map(str, ops))) == program


def test_every_row_of_the_table_of_ops_parses_and_renders_to_itself():
    assert [str(parse_op(row.text)) for row in ROWS] == [row.text for row in ROWS]
    assert [parse_op(row.text).row for row in ROWS] == list(ROWS)
    assert {row.kind for row in ROWS} == set(Kind)


def test_the_documentation_says_of_every_op_what_its_row_says():
    page = (Path(__file__).parents[2] / "docs/programs.md").read_text()
    section = page.partition("## Ops")[2].partition("## A small program")[0]
    written = [line for line in section.splitlines() if line.startswith("| `")]
    assert set(written) == {f"| `{row.text}` | {row.lane} | {row.meaning} |" for row in ROWS}


@pytest.mark.parametrize(
    "text",
    [
        "JUMP 3@w0",
        "LOAD 3@w0",
        "LOAD 3@w0.1>h0",
        "LOAD 03@w0.1",
        "F 3@w0",
        "F 3.0",
        "CLIP 3",
        "READ 3>t0",
        "READ 3#0>h0",
        "STEP 3#0",
        "STEP 3#0<t2",
        "GRAD 3@w0.1",
        "F  3.0@w0",
    ],
)
def test_anything_else_is_refused_with_its_text_and_position(text):
    with pytest.raises(ProgramError, match="op 1: ") as caught:
        parse(f"CLIP\n\n{text}")
    assert repr(text) in str(caught.value)


def test_of_an_op_in_another_form_its_forms_are_said():
    with pytest.raises(ProgramError, match="write it like READ 0>h0 or READ 0#0>t0"):
        parse("READ 3")
    with pytest.raises(ProgramError, match=r"docs/programs.md .*: LOAD, FREE, "):
        parse("MOVE 3")


def test_an_op_with_other_fields_than_its_kind_needs_is_not_well_formed():
    assert is_well_formed(Op(kind=Kind.STEP, unit=1))
    assert not is_well_formed(Op(kind=Kind.STEP, unit=1, buffer=0))
    assert not is_well_formed(Op(kind=Kind.STEP))


def test_an_excerpt_points_at_one_op():
    program = parse("F 0.0@w0; F 1.0@w0; CLIP; STEP 0")
    assert excerpt(program, 1, radius=1).splitlines() == [
        "        0  F 0.0@w0",
        "-->     1  F 1.0@w0",
        "        2  CLIP",
    ]
    assert excerpt(program, 4, radius=1).splitlines() == [
        "        3  STEP 0",
        "-->     4  (end of the program)",
    ]


def test_a_program_prints_as_its_text():
    assert str(parse("CLIP;STEP 0")) == "CLIP\nSTEP 0"
    assert len(parse("")) == 0
