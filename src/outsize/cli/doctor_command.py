"""``outsize doctor``: what is wrong with a machine or a run, what that costs, and what a remedy brings."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outsize.cli.text.console import Output, columns
from outsize.cli.text.options import JsonOption, SetOption
from outsize.errors import ConfigError
from outsize.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outsize.doctor.examine import Report
    from outsize.doctor.finding import Remedy
    from outsize.doctor.run_record import Facts, RunRecord
    from outsize.training.short_runs import ShortRun, Turns

# What steps that save nothing do not show.
_UNSEEN = ("train.save_", "eval.", "telemetry.")


def trials_of(report: "Report", recorded: "RunRecord", named: Sequence[str]) -> list[list[str]]:
    """Return the settings that are tried one after the other.

    Args:
        report: its findings; their remedies that leave the training as it is are tried where none is named.
        recorded: the run.
        named: settings to try instead, ``section.key=value``; they may change the training.

    Raises:
        ConfigError: there is nothing to try, or it shows in no trial; or the run is one of several processes.
    """
    if int(recorded.about.get("num_ranks", 1)) > 1:
        raise ConfigError("--try trains in one process, and the run had several; try it with outsize train")
    if not recorded.config:
        raise ConfigError(f"--try needs the configuration of the run, and {recorded.directory} holds none")
    unseen = [setting for setting in named if setting.startswith(_UNSEEN)]
    if unseen:
        raise ConfigError(f"--set {unseen[0]}: a trial saves and measures nothing; train with it")
    return [list(named)] if named else _remedies(remedy for one in report.findings for remedy in one.remedies)


def tried(recorded: "RunRecord", trials: list[list[str]], steps: int, turns: int, output: Output) -> None:
    """Try settings by turns, each with those before it that helped, and print what came of it.

    Raises:
        ConfigError: the only trial there is does not fit, or is of a setting that the run was made with.
        OutsizeError: as `outsize.training.short_runs.by_turns`.
    """
    from outsize.config import load_config
    from outsize.training.short_runs import by_turns

    path, helpful = Path(recorded.directory) / "config.yaml", list[str]()
    for settings in trials:
        try:
            before = load_config(path, helpful, environ={})
            after = load_config(path, [*helpful, *settings], environ={})
            if after == before:
                raise ConfigError(
                    f"{' '.join(settings)}: the run was made with it already; name another with --set"
                )
            trial = by_turns(before, after, steps, turns, output.say)
        except ConfigError as error:
            if len(trials) == 1:
                raise
            output.say(f"{' '.join(settings)}: not tried: {error}")
            continue
        output.emit({"trial": {"settings": settings, **trial.to_dict()}})
        output.print_result("\n".join(_told(trial, settings, steps)))
        if trial.is_clear and trial.gain > 0:
            helpful += settings
    if len(trials) > 1:
        flags = " ".join(f"--set {setting}" for setting in helpful)
        output.print_result(f"\nto keep: {flags}" if helpful else "\nnothing of that is worth keeping")


def _remedies(remedies: Iterator["Remedy"]) -> list[list[str]]:
    """Return the settings that leave the training as it is, each once."""
    candidates = list(remedies)
    same = dict.fromkeys(remedy.setting for remedy in candidates if remedy.is_same_training)
    if same:
        return [setting.split() for setting in same]
    if not candidates:
        raise ConfigError(
            "--try: no finding has a setting for its remedy; name one, as --set memory.prefetch=2"
        )
    raise ConfigError(
        f"--try: what may help changes the training: {candidates[0].setting}; "
        f"name it to try it all the same: --try --set {candidates[0].setting}"
    )


def _told(trial: "Turns", settings: list[str], steps: int) -> Iterator[str]:
    """Yield what came of a trial, in words."""
    yield f"\ntried {' '.join(settings)}: {len(trial.before)} turns of {steps} steps without and with it"
    rows: list[tuple[str, ...]] = [("", "step", "of all turns", "tokens/s", "device", "host", "disk")]
    rows += [_row("before", trial.before), _row("after", trial.after)]
    yield from columns(rows)
    if not trial.is_clear:
        yield "no difference beyond that between turns"
    else:
        yield f"{abs(trial.gain):.0%} {'less' if trial.gain > 0 else 'more'} time per token"


def _row(name: str, runs: Sequence["ShortRun"]) -> tuple[str, ...]:
    seconds = [run.step_s for run in runs]
    rate = statistics.median(run.tokens_per_s for run in runs)
    spread = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
    memory = (format_bytes(runs[-1].memory_bytes[tier]) for tier in ("device", "host", "disk"))
    return (name, format_seconds(statistics.median(seconds)), spread, f"{rate:,.0f}", *memory)


_STEPS = "Steps of a turn of --try, the first not counted; default: 3."
_TURNS = "Turns of --try, each without and with the remedy; default: 3."


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="Directory of a run: its heartbeat gives the verdict."),
    ] = None,
    machine_file: Annotated[
        Path | None,
        typer.Option(
            "--machine",
            metavar="FILE",
            help="What `outsize probe -o` wrote; without it or RUN, probe quickly.",
        ),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="Another run of the same model, with other tokens per step; repeatable."
        ),
    ] = None,
    fail_on: Annotated[
        Literal["error", "warning", "never"],
        typer.Option(help="Exit with status 1 where a finding is as bad as this."),
    ] = "error",
    is_trial: Annotated[
        bool, typer.Option("--try", help="Train a few steps of RUN without and with its remedies.")
    ] = False,
    overrides: SetOption = None,
    steps: Annotated[int | None, typer.Option(min=2, help=_STEPS)] = None,
    turns: Annotated[int | None, typer.Option(min=2, help=_TURNS)] = None,
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong with this machine or with a run: evidence, fix, and expected gain, the largest first.

    --try measures fixes: settings that leave the training as it is, one after the other, or the one that --set names.
    """
    from outsize.cli.text import records_text
    from outsize.doctor.examine import examine
    from outsize.doctor.finding import SEVERITIES

    output = Output(as_json=as_json)
    with output.guarded():
        if (is_trial or overrides or steps or turns) and not (is_trial and run):
            raise ConfigError(
                "--set, --steps and --turns go with --try, and --try with a run: outsize doctor RUN --try"
            )
        facts = _facts(run, machine_file, beside or (), output)
        report = examine(facts)
        output.emit(asdict(report))
        output.print_result(records_text.describe(report))
        if is_trial:
            tried(facts.run, trials_of(report, facts.run, overrides or ()), steps or 3, turns or 3, output)
    failing = () if fail_on == "never" else SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    if any(finding.severity in failing for finding in report.findings):
        raise typer.Exit(1)


def _facts(run: Path | None, machine_file: Path | None, beside: Sequence[Path], output: Output) -> "Facts":
    """Return what was recorded; a quick probe of this machine where nothing is named."""
    from outsize.doctor.run_record import Facts, read_run
    from outsize.hardware import machine_file as files
    from outsize.reporting.history import empty_files

    recorded = read_run(run) if run else None
    if beside and recorded is None:
        raise ConfigError(
            "--beside compares with a run: name that one first, outsize doctor RUN --beside RUN"
        )
    others = tuple(read_run(other) for other in beside)
    for path in (path for directory in (*filter(None, [run]), *beside) for path in empty_files(directory)):
        output.say(f"note: {path} is empty, and counts as absent")
    probed = files.read(machine_file) if machine_file else None
    if recorded is None and probed is None:
        from outsize.probing.effort import QUICK
        from outsize.probing.run_probe import probe

        probed = probe(QUICK, [Path()], announce=lambda name, *_: output.say(f"probing: {name}"))
    return Facts(probed=probed, recorded=recorded, others=others)
