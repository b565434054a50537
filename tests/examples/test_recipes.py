"""Recipes and what to choose are planned as they say: they fit their machine, at the speed that the pages name."""

import runpy
from pathlib import Path

import pytest

from outsize.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "recipes_page.py"))
CHOICES = runpy.run_path(str(ROOT / "scripts" / "choices_page.py"))
# What is written is brought up to date by scripts/recipes_page.py, not at every change of the planner.
NEAR = 0.1


@pytest.mark.parametrize("path", PAGE["RECIPES"], ids=lambda path: path.stem)
def test_a_recipe_fits_its_machine_and_is_as_fast_as_it_says(path):
    recipe = PAGE["Recipe"].read(path)
    assert PAGE["predicted"](recipe) == pytest.approx(recipe.predicted, rel=NEAR), (
        "python scripts/recipes_page.py writes what is predicted now"
    )


@pytest.mark.parametrize("path", PAGE["RECIPES"], ids=lambda path: path.stem)
def test_a_recipe_names_itself_and_has_no_setting_without_effect(path):
    assert PAGE["Recipe"].read(path).plan.split()[2] == str(path.relative_to(ROOT))
    assert load_config(path, environ={}).notes() == []


def test_the_table_of_choices_is_that_of_its_cases():
    page = CHOICES["PAGE"].read_text(encoding="utf-8")
    rows = page.partition(CHOICES["BEGIN"])[2].partition(CHOICES["END"])[0].splitlines()[2:]
    cases = CHOICES["CASES"]
    assert [row.split("`")[1] for row in rows] == [machine for _, _, machine in cases]
    # Of one model, so that it is counted once: those that are asked in a second or two.
    quick = [
        row for case, row in zip(cases, rows, strict=True) if "2x4090" in case[2] or "--nodes" in case[2]
    ]
    assert len(quick) == 3
    now = [CHOICES["row"](*case) for case in cases if "2x4090" in case[2] or "--nodes" in case[2]]
    assert now == quick, "python scripts/choices_page.py writes what is predicted now"


def test_the_table_of_readme_is_that_of_the_recipes():
    assert PAGE["BEGIN"] + PAGE["table"]() + PAGE["END"] in (ROOT / "README.md").read_text(encoding="utf-8")
