"""``--dry-run``: what would be done, without doing it."""

from typing import TYPE_CHECKING

from outsize.cli.console import Output

if TYPE_CHECKING:
    from outsize.config import Config


def print_plan(config: "Config", output: Output) -> None:
    """Print the resolved configuration and the plan of a run; fails as the run would if nothing fits."""
    from outsize.config import dump_config
    from outsize.train import run

    for note in config.notes():
        output.say(f"note: {note}")
    plan = run.plan(config)
    output.emit({"config": config.model_dump(mode="json"), "plan": plan.to_dict()})
    output.print_result(f"{dump_config(config)}\n{plan.table}")
