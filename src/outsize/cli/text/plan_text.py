"""``--dry-run``: what would be done, without doing it."""

from typing import TYPE_CHECKING

from outsize.cli.text.console import Output
from outsize.units import format_seconds

if TYPE_CHECKING:
    from outsize.config import Config


def print_plan(config: "Config", output: Output) -> None:
    """Print the plan of a run, then the configuration it is of; fails as the run would if nothing fits."""
    from outsize.config import dump_config
    from outsize.training import run

    plan, forecast = run.foresee(config, announce=output.say)
    predicted_s = None if forecast is None else forecast.step_s
    output.emit(
        {
            "config": config.model_dump(mode="json"),
            "plan_id": plan.plan_id,
            "plan": plan.to_dict(),
            "predicted_step_s": predicted_s,
        }
    )
    told = "" if predicted_s is None else f"\npredicted step{format_seconds(predicted_s):>24}"
    output.print_result(f"{plan.table}{told}\n\n{dump_config(config)}")
