"""``outsize doctor``: what is wrong with a machine or a run, what that costs, and what a remedy brings."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import JsonOption, SetOption
from outsize.errors import ConfigError

if TYPE_CHECKING:
    from outsize.doctor.run_record import Facts

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
            "--beside",
            metavar="RUN",
            help="Another run of the same model, with other tokens per step; repeatable.",
        ),
    ] = None,
    fail_on: Annotated[
        Literal["error", "warning", "never"],
        typer.Option(help="Exit with status 1 where a finding is as bad as this."),
    ] = "error",
    is_trial: Annotated[
        bool,
        typer.Option("--try", help="Train a few steps of RUN without and with its remedies."),
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
            from outsize.cli.doctor_trial import trials_of, tried

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
