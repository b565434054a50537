"""Ask ``outsize plan --compare`` about models and machines, and write what to choose into docs/compare.md.

python scripts/choices_page.py            # a minute of one core
"""

import json
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from model_configs import MODELS  # noqa: E402 - of the benchmarks

from outsize.cli.plan.plan_compare import choice  # noqa: E402 - after the path is known
from outsize.cli.plan.plan_options import PlanFlags  # noqa: E402
from outsize.cli.plan.plan_question import ask_what_fits  # noqa: E402
from outsize.planner.predict.alternatives import alternatives  # noqa: E402
from outsize.planner.predict.prediction import fastest  # noqa: E402

PAGE = ROOT / "docs" / "compare.md"
BEGIN, END = "<!-- choices -->\n", "<!-- end of choices -->"
# Model, method, and the machine in options of the command.
CASES = (
    ("Qwen3-1.7B", "full", "--gpus 4090 --ram 64GB"),
    ("Llama-3.1-8B", "lora", "--gpus 4090 --ram 64GB"),
    ("Llama-3.1-8B", "full", "--gpus 4090 --ram 128GB"),
    ("Llama-3.1-8B", "full", "--gpus 2x4090 --ram 128GB"),
    ("Llama-3.1-8B", "full", "--gpus 8x4090 --ram 512GB"),
    ("Llama-3.1-8B", "full", "--gpus 4xa100"),
    ("Llama-3.1-8B", "full", "--gpus 8xh100"),
    ("Llama-3.1-8B", "full", "--gpus 4090 --ram 128GB --nodes 4 --net 25Gb"),
    ("Llama-3.1-8B", "full", "--gpus 8xh100 --nodes 4 --net 400Gb"),
    ("Qwen3-32B", "lora", "--gpus 4090 --ram 128GB"),
    ("Qwen3-32B", "full", "--gpus 8x4090 --ram 768GB"),
    ("Llama-3.1-70B", "lora", "--gpus 2x3090 --ram 256GB"),
    ("Llama-3.1-70B", "full", "--gpus 8xh100 --ram 2TB"),
)


def row(model: str, method: str, machine: str) -> str:
    """Return the row of a case: the model, the machine, our prediction, and what to choose and why."""
    words = shlex.split(machine)
    named = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
    settings = {**named, "nodes": int(named.get("nodes", 1)), "method": method}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(MODELS[model]))
        asked = ask_what_fits(PlanFlags(model=str(config), named=frozenset(settings), **settings))
    found = fastest(asked.question)
    so = choice(found, alternatives(asked.machines)).removeprefix("so: ")
    low, high = found.interval
    what = f"{model}, {'whole' if method == 'full' else 'LoRA'}"
    return f"| {what} | `{machine}` | {found.tokens_per_s:,.0f} ({low:,.0f} to {high:,.0f}) | {so} |"


def main() -> None:
    """Put the table into the page."""
    head = "| model | machine | outsize, predicted tokens/s | what to choose |\n|---|---|--:|---|\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    rows = "".join(f"{row(*case)}\n" for case in CASES)
    PAGE.write_text(before + BEGIN + head + rows + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
