"""``--dry-run``: what would be done, without doing it."""

from typing import TYPE_CHECKING

from outsize.cli.text.console import Output
from outsize.units import format_seconds

if TYPE_CHECKING:
    from outsize.config import Config


def print_plan(config: "Config", output: Output) -> None:
    """Print the plan of a run, then the configuration it is of; fails as the run would if nothing fits."""
    from outsize.config import dump_config
    from outsize.objectives.recipes import objective_of
    from outsize.training import run

    if objective_of(config) is not None:
        _print_plans(config, output)
        return
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
    prediction = "" if predicted_s is None else f"\npredicted step{format_seconds(predicted_s):>24}"
    output.print_result(f"{plan.table}{prediction}\n\n{dump_config(config)}")


def _print_plans(config: "Config", output: Output) -> None:
    """Print the plans of a run by a trainer: of the model that trains, and of the one it is compared with."""
    from outsize.config import dump_config
    from outsize.objectives import objective_run

    plans = objective_run.foresee(config, output.say)
    trained = plans["trained"]
    frozen = {name: plan.to_dict() for name, plan in plans.items() if plan is not trained}
    output.emit(
        {
            "config": config.model_dump(mode="json"),
            "plan_id": trained.plan_id,
            "plan": trained.to_dict(),
            **{f"plan_{name}": plan for name, plan in frozen.items()},
        }
    )
    tables = [f"{name} model\n{plan.table}" for name, plan in plans.items()]
    output.print_result("\n\n".join([*tables, dump_config(config)]))
