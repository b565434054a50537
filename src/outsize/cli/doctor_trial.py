"""``outsize doctor RUN --try``: a few steps of the run without a remedy and with it, by turns."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from outsize.cli.text.console import Output, columns
from outsize.config import Config, load_config
from outsize.doctor.examine import Report
from outsize.doctor.finding import Remedy
from outsize.doctor.run_record import RunRecord
from outsize.errors import ConfigError
from outsize.training.short_runs import ShortRun, Turns, by_turns
from outsize.units import format_bytes, format_seconds

# What steps whose batches are made beforehand, and that save nothing, do not show.
_UNSEEN = ("data.workers", "data.prefetch", "train.save_", "eval.", "telemetry.")


def chosen(report: Report, recorded: RunRecord, named: Sequence[str]) -> tuple[Config, Config, list[str]]:
    """Return the run as it is, the run with what is to be tried, and what that is.

    Args:
        report: its findings; the first remedy that leaves the training as it is is taken where none is named.
        recorded: the run.
        named: settings to try instead, ``section.key=value``; they may change the training.

    Raises:
        ConfigError: there is nothing to try, or it shows in no trial; or the run is one of several processes.
    """
    if int(recorded.about.get("num_ranks", 1)) > 1:
        raise ConfigError("--try trains in one process, and the run had several; try it with outsize train")
    if not recorded.config:
        raise ConfigError(f"--try needs the configuration of the run, and {recorded.directory} holds none")
    settings = list(named) or [_first(remedy for finding in report.findings for remedy in finding.remedies)]
    unseen = [setting for setting in settings if setting.startswith(_UNSEEN)]
    if unseen:
        raise ConfigError(
            f"--set {unseen[0]}: a trial reads its batches first and saves nothing; "
            "train with it, and compare waits_s in both heartbeats"
        )
    path = Path(recorded.directory) / "config.yaml"
    before = load_config(path, environ={})
    after = load_config(path, settings, environ={})
    if after == before:
        raise ConfigError(f"{' '.join(settings)}: the run was made with it already; name another with --set")
    return before, after, settings


def tried(before: Config, after: Config, settings: list[str], steps: int, turns: int, output: Output) -> None:
    """Run the trial, and print what it found.

    Raises:
        OutsizeError: as `outsize.training.short_runs.by_turns`.
    """
    trial = by_turns(before, after, steps, turns, output.say)
    output.emit({"trial": {"settings": settings, **trial.to_dict()}})
    output.print_result("\n".join(_told(trial, settings, steps)))


def _first(remedies: Iterator[Remedy]) -> str:
    candidates = list(remedies)
    same = [remedy.setting for remedy in candidates if remedy.is_same_training]
    if same:
        return same[0]
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
