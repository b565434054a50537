"""``--dry-run``: what would be done, without doing it."""

from typing import TYPE_CHECKING

from outsize.cli.text.console import Output
from outsize.units import format_seconds

if TYPE_CHECKING:
    from outsize.config import Config


def print_plan(config: "Config", output: Output) -> None:
    """Print the configuration of a run, then its plan, then what it does; fails as the run would if nothing fits."""
    from outsize.config import dump_config
    from outsize.objectives.recipes import objective_of
    from outsize.training.dry_run import foresee

    if objective_of(config) is not None:
        _print_plans(config, output)
        return
    foreseen = foresee(config, announce=output.say)
    plan, forecast, config = foreseen.plan, foreseen.forecast, foreseen.config
    predicted_s = None if forecast is None else forecast.step_s
    output.emit(
        {
            "config": config.model_dump(mode="json"),
            "plan_id": plan.plan_id,
            "plan": plan.to_dict(),
            "predicted_step_s": predicted_s,
            "would": foreseen.headline,
        }
    )
    prediction = "" if predicted_s is None else f"\npredicted step{format_seconds(predicted_s):>24}"
    output.print_result(
        f"{dump_config(config).rstrip()}\n\n{plan.table}{prediction}\n\nwould {foreseen.headline}"
    )


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
    output.print_result("\n\n".join([dump_config(config).rstrip(), *tables]))
