"""Plan every recipe of examples/recipes, and write what is predicted into it and into README's table of cards.

python scripts/recipes_page.py            # 20 seconds of one core
"""

import json
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from model_configs import config_of  # noqa: E402 - of the benchmarks

from outsize.cli.plan.plan_model import with_run  # noqa: E402
from outsize.cli.plan.plan_options import PlanFlags  # noqa: E402 - after the path is known
from outsize.cli.plan.plan_question import ask_what_fits  # noqa: E402
from outsize.planner.predict.prediction import fastest  # noqa: E402

README = ROOT / "README.md"
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
BEGIN, END = "<!-- recipes -->\n", "<!-- end of recipes -->"
HEADINGS = ("GPU", "RAM", "trains", "predicted tokens/s (interval)")


@dataclass(frozen=True)
class Recipe:
    """What the first lines of a recipe say of it.

    Attributes:
        path: of the file.
        card: GPUs, in words.
        memory: of the host.
        trains: which model, and how.
        plan: the command that plans it.
        predicted: tokens per second, the low and the high end of the interval; none where nothing is written yet.
    """

    path: Path
    card: str
    memory: str
    trains: str
    plan: str
    predicted: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """Return the recipe in ``path``."""
        lines = dict(re.findall(r"^# (\w+): ?(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))
        numbers = re.findall(r"[\d,]+(?= tokens/s| to|\))", lines["predicted"])
        predicted = tuple(int(number.replace(",", "")) for number in numbers)
        return cls(path, lines["card"], lines["memory"], lines["trains"], lines["plan"], predicted)

    @property
    def row(self) -> str:
        """Its row of the table."""
        rate, low, high = self.predicted
        target = self.path.relative_to(ROOT)
        return f"| {self.card} | {self.memory} | [{self.trains}]({target}) | {rate:,} ({low:,} to {high:,}) |"


def predicted(recipe: Recipe) -> tuple[int, int, int]:
    """Return tokens per second as ``outsize plan`` predicts them, and their interval; the model's config is kept here.

    Raises:
        InfeasiblePlanError: it does not fit.
    """
    run = yaml.safe_load(recipe.path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        config, file = Path(folder) / "config.json", Path(folder) / "run.yaml"
        config.write_text(json.dumps(config_of(run["model"]["path"])))
        run["model"]["path"] = str(config)
        file.write_text(yaml.safe_dump(run))
        words = shlex.split(recipe.plan)[3:]
        named = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        found = fastest(ask_what_fits(with_run(PlanFlags(model=str(file), **named))).question)
    return round(found.tokens_per_s), round(found.interval[0]), round(found.interval[1])


def table() -> str:
    """Return the table of all recipes, by what is written in them, from the least host memory on."""
    recipes = sorted(map(Recipe.read, RECIPES), key=lambda each: int(each.memory.partition(" ")[0]))
    rows = [recipe.row for recipe in recipes]
    return "\n".join([f"| {' | '.join(HEADINGS)} |", "|---|---|---|---|", *rows, ""])


def main() -> None:
    """Write what is predicted into recipes and README."""
    for path in RECIPES:
        rate, low, high = predicted(Recipe.read(path))
        line = f"# predicted: {rate:,} tokens/s ({low:,} to {high:,}), and measured by nobody yet"
        path.write_text(re.sub(r"^# predicted:.*$", line, path.read_text(), count=1, flags=re.MULTILINE))
    write_table()


def write_table() -> None:
    """Put the table into README."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
