"""``outsize doctor RUN --try``: a few steps of the run without each remedy and with it, by turns."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from outsize.cli.text.console import Output, columns
from outsize.config import load_config
from outsize.doctor.examine import Report
from outsize.doctor.finding import Remedy
from outsize.doctor.run_record import RunRecord
from outsize.errors import ConfigError
from outsize.training.short_runs import ShortRun, Turns, by_turns
from outsize.units import format_bytes, format_seconds

# What steps that save nothing do not show.
_UNSEEN = ("train.save_", "eval.", "telemetry.")


def trials_of(report: Report, recorded: RunRecord, named: Sequence[str]) -> list[list[str]]:
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


def tried(recorded: RunRecord, trials: list[list[str]], steps: int, turns: int, output: Output) -> None:
    """Try settings by turns, each with those before it that helped, and print what came of it.

    Raises:
        ConfigError: the only trial there is does not fit, or is of a setting that the run was made with.
        OutsizeError: as `outsize.training.short_runs.by_turns`.
    """
    path, kept = Path(recorded.directory) / "config.yaml", list[str]()
    for settings in trials:
        try:
            before = load_config(path, kept, environ={})
            after = load_config(path, [*kept, *settings], environ={})
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
            kept += settings
    if len(trials) > 1:
        flags = " ".join(f"--set {setting}" for setting in kept)
        output.print_result(f"\nto keep: {flags}" if kept else "\nnothing of that is worth keeping")


def _remedies(remedies: Iterator[Remedy]) -> list[list[str]]:
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


def _told(trial: Turns, settings: list[str], steps: int) -> Iterator[str]:
    """Yield what came of a trial, in words."""
    yield f"\ntried {' '.join(settings)}: {len(trial.before)} turns of {steps} steps without and with it"
    rows: list[tuple[str, ...]] = [("", "step", "of all turns", "tokens/s", "device", "host", "disk")]
    rows += [_row("before", trial.before), _row("after", trial.after)]
    yield from columns(rows)
    if not trial.is_clear:
        yield "no difference beyond that between turns"
    else:
        yield f"{abs(trial.gain):.0%} {'less' if trial.gain > 0 else 'more'} time per token"


def _row(name: str, runs: Sequence[ShortRun]) -> tuple[str, ...]:
    seconds = [run.step_s for run in runs]
    rate = statistics.median(run.tokens_per_s for run in runs)
    spread = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
    memory = (format_bytes(runs[-1].memory_bytes[tier]) for tier in ("device", "host", "disk"))
    return (name, format_seconds(statistics.median(seconds)), spread, f"{rate:,.0f}", *memory)
