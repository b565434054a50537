"""Answer ``outsize plan --generate``, and the questions of a program: `outsize.predict`."""

from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast, overload

from outsize.choices import Home
from outsize.cli.plan.plan_model import AskedModel, with_run
from outsize.cli.plan.plan_options import PlanFlags, check_kinds, check_question
from outsize.cli.plan.plan_question import Asked, ask, ask_what_fits, asked_model
from outsize.cli.plan.plan_table import headline
from outsize.cli.text.console import as_text
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import Machine
from outsize.model.sizes.model_spec import ITEMSIZE
from outsize.planner.predict.generation import Generation, Texts, generation
from outsize.planner.predict.prediction import Prediction, fastest
from outsize.units import format_bytes, format_seconds

# Options of the command that say what is printed or written beside a prediction.
REPORTING = {"largest", "compare", "what_if", "full", "advice", "timeline", "output_file", "named"}


@overload
def predict(
    model: str | Path,
    *,
    gpus: str | None = None,
    machine: Machine | str | Path | None = None,
    tokens_per_step: int | None = None,
    home: Home = "auto",
    generate: Literal[False] = False,
    **options: Any,
) -> Prediction: ...


@overload
def predict(
    model: str | Path,
    *,
    gpus: str | None = None,
    machine: Machine | str | Path | None = None,
    home: Home = "auto",
    generate: Literal[True],
    **options: Any,
) -> Generation: ...


def predict(
    model: str | Path,
    *,
    gpus: str | None = None,
    machine: Machine | str | Path | None = None,
    tokens_per_step: int | None = None,
    home: Home = "auto",
    generate: bool = False,
    **options: Any,
) -> Prediction | Generation:
    """Return what training would take, with the plan, its program and a timeline: ``outsize plan`` as a function.

    Args:
        model: as the command takes it.
        gpus: such as ``"4x4090"``.
        machine: instead of them; a file, or a machine of a program's own.
        tokens_per_step: None for as many as fit, at most 64 sequences.
        home: where weights and optimizer state rest.
        generate: whether writing text is asked about instead.
        options: further ones of the command, with underscores for hyphens.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
        ModelError: no model there, or none that can be counted.
        InfeasiblePlanError: nothing fits.
    """
    names = [field.name for field in fields(PlanFlags)]
    for name in options:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            raise ConfigError(
                f"{name} is no option of outsize plan" + (f"; did you mean {near[0]}?" if near else "")
            )
    if reports := sorted(set(options) & REPORTING):
        raise ConfigError(
            f"{', '.join(reports)}: what outsize plan prints or writes, and no part of a prediction"
        )
    given: dict[str, Any] = {"gpus": gpus, "tokens_per_step": tokens_per_step, "home": home, **options}
    if given.get("resident") is not None:
        given["resident"] = str(given["resident"])
    check_kinds(given)
    named = frozenset(name for name, value in given.items() if value not in (None, "auto"))
    described = Path(machine) if isinstance(machine, str) else machine
    if not isinstance(described, Machine | Path | None):
        raise ConfigError(
            f"machine: a file or an outsize Machine, not {machine!r}; write a machine in words into a file"
        )
    flags = PlanFlags(model=str(model), machine=cast(Any, described), named=named, generate=generate, **given)
    check_question(flags)
    if generate:
        request, texts = ask_of_texts(with_run(flags))
        return generation(request.question, texts)
    request = ask_what_fits(with_run(flags))
    return replace(fastest(request.question), tokens=request.tokens)


def ask_of_texts(options: PlanFlags) -> tuple[Asked, Texts]:
    """Return the question of writing text, whose sequences are prompts, and the texts.

    Raises:
        ConfigError: an option is wrong.
        ModelError: no model there, or none that can be counted.
    """
    model = asked_model(options)
    request = ask(replace(options, tokens_per_step=None), model)
    return request, _texts(options, request.model, request.question.seq_len)


def _texts(options: PlanFlags, model: AskedModel, prompt_tokens: int) -> Texts:
    """Return the texts that options ask about."""
    count, new_tokens, limit = options.batch_size, options.max_new_tokens, model.positions
    if count < 1 or new_tokens < 1:
        raise ConfigError("--batch-size and --max-new-tokens: at least one text of one new token is written")
    if limit is not None and prompt_tokens + new_tokens > limit:
        raise ConfigError(
            f"--max-new-tokens: {new_tokens} behind a prompt of {prompt_tokens} are more than the {limit} "
            "positions of the model; lower it, or --seq-len, which is the prompt's"
        )
    if not model.described.cached:
        raise ConfigError("--generate is of models that write with keys and values; leave it out")

    def cache_bytes(length: int) -> int:
        elements = (size * min(length, window or length) for size, window in model.described.cached)
        return ITEMSIZE[options.dtype] * sum(elements)

    return Texts(
        count=count,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        cache_bytes=cache_bytes,
        experts=model.described.experts,
    )


def render(request: Asked, result: Generation) -> str:
    """Return what writing would take, for people."""
    where = "in host memory" if result.home == "host" else "on disk"
    texts = "1 text" if result.texts == 1 else f"{result.texts:,} texts"
    cache = f"{format_bytes(result.cache_bytes)}{', in host memory' if result.cache_on_host else ''}"
    experts = ""
    if result.expert_bytes:
        experts = f" and {result.kept_expert_bytes / result.expert_bytes:.0%} of the experts"
    even = "nothing moves, so no number of texts is needed to hide it"
    if result.bytes_per_pass:
        even = "no number of texts at once makes computing take as long as moving weights"
        if result.break_even_texts is not None:
            room = "" if result.break_even_fits else ", more than have room for keys and values on the GPU"
            even = (
                f"break-even: {result.break_even_texts:,} texts at once, of which computing takes as long as moving "
                f"weights{room}"
            )
    speed = f"{result.tokens_per_s:,.0f}" if result.tokens_per_s >= 10 else f"{result.tokens_per_s:.2f}"
    return as_text(
        headline(request, f"text behind prompts of {request.question.seq_len:,} tokens"),
        f"weights of {format_bytes(result.weight_bytes)} rest {where}; {result.kept_units} of {result.units} units"
        f"{experts} stay on the GPU, with {format_bytes(result.device_bytes)} of "
        f"{format_bytes(request.question.budgets.device)} there; keys and values {cache}",
        f"{speed} tokens/s of {texts}, {format_seconds(result.pass_s)} for a token of each; first token after "
        f"{format_seconds(result.first_token_s)}",
        f"{format_bytes(result.bytes_per_pass)} come up for a token; what it waits for is {result.ends_it}",
        even,
        *(f"note: {note}" for note in request.figures.notes),
        *(f"assumed: {assumption}" for assumption in result.assumptions),
    )
