"""``outsize plan``: what training a model on a machine would take, predicted without the model or the machine."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from outsize.cli.plan.plan_options import PlanFlags, check_question
from outsize.cli.text.console import Output, write_output
from outsize.cli.text.options import with_options

if TYPE_CHECKING:
    from outsize.cli.plan.plan_question import Asked
    from outsize.planner.predict.prediction import Prediction
    from outsize.planner.predict.what_if import Outcome


@with_options(PlanFlags)
def plan(options: PlanFlags, output: Output) -> None:
    """Predict memory, speed and what would help, from a config.json and the figures of a machine.

    Needs no GPU and no weights; every figure is a prediction, and the assumptions behind it are printed.
    """
    from outsize.cli.plan import plan_compare, plan_table
    from outsize.cli.plan.plan_compare import largest_models
    from outsize.cli.plan.plan_model import with_run
    from outsize.cli.plan.plan_question import ask_what_fits
    from outsize.planner.predict.alternatives import alternatives

    check_question(options)
    options = with_run(options)
    if options.generate:
        _generated(options, output)
        return
    request = ask_what_fits(options)
    others = alternatives(request.machines) if options.compare else ()
    prediction, outcomes, helps = _answer(request, options.what_if or [], options.advice, output)
    with _uncollected():
        scaled = largest_models(request) if options.largest else ()
    _write(request, prediction, options)
    if output.as_json:
        compared = plan_compare.to_dict(request, prediction, others) if others else {}
        output.emit({**plan_table.to_dict(request, prediction, outcomes, helps, scaled), **compared})
        return
    show = plan_table.render if options.full else plan_table.render_short
    output.print_result(show(request, prediction, outcomes, helps, scaled))
    if others:
        output.print_result("\n" + plan_compare.render(request, prediction, others))


def _answer(
    request: "Asked", changes: list[str], advice: bool, output: Output
) -> "tuple[Prediction, list[Outcome], list[Outcome]]":
    """Return the prediction, what the changes that were asked about would bring, and what the usual ones would."""
    from outsize.cli.plan import plan_table
    from outsize.cli.plan.plan_question import in_options
    from outsize.errors import InfeasiblePlanError
    from outsize.planner.predict.changes import parse_change
    from outsize.planner.predict.decision_search import decide
    from outsize.planner.predict.prediction import predict
    from outsize.planner.predict.what_if import estimated_outcome, outcome, usual_changes

    question = request.question
    for change in changes:
        parse_change(change)  # what is no change is said before anything is searched
    with _uncollected():
        try:
            decision = decide(question)
        except InfeasiblePlanError as error:
            question = replace(question, auto=())
            for what_if in (outcome(question, None, change) for change in changes):
                output.say(f"what if {what_if.change}: {plan_table.in_short(what_if)}")
            raise InfeasiblePlanError(in_options(error.message), error.short_by) from None
        prediction = replace(predict(decision), tokens=request.tokens)
        # What is asked next goes on from the codec that was found.
        question = replace(decision.question, auto=())
        usual = usual_changes(question, prediction) if advice else ()
        outcomes = [outcome(question, prediction, change) for change in changes]
        # A step of several GPUs takes a second to simulate; what would help is told from estimates then, which know
        # links and host memory, but no disk.
        estimated = prediction.num_gpus > 1 and prediction.home == "host"
        judge = estimated_outcome if estimated else partial(outcome, near=True)
        helps = [judge(question, prediction, change) for change in usual if change not in changes]
    return prediction, outcomes, helps


def _generated(options: PlanFlags, output: Output) -> None:
    """Answer what writing text would take."""
    from dataclasses import asdict

    from outsize.cli.plan.plan_generate import ask_of_texts, render
    from outsize.planner.predict.generation import generation

    request, texts = ask_of_texts(options)
    result = generation(request.question, texts)
    output.emit({"kind": "generation", "model": request.name, **asdict(result)})
    output.print_result(render(request, result))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage: what planners make has no cycles, and looking takes a third of the time, or once behind."""
    collects = gc.isenabled()
    gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def _write(request: "Asked", prediction: "Prediction", options: PlanFlags) -> None:
    """Write the files that options name."""
    from outsize.cli.plan.plan_question import train_yaml
    from outsize.reporting.html_page import to_chrome

    if options.timeline is not None:
        write_output(options.timeline, to_chrome(prediction.timeline))
    if options.output_file is not None:
        write_output(options.output_file, train_yaml(request, prediction))
