"""``outsize doctor``: what is wrong with a machine or a run, and what that costs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import JsonOption


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
            help="What `outsize probe -o` wrote. Without it and without RUN a quick probe is made.",
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
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong with this machine or with a run: evidence, fix, and expected gain, the largest first."""
    from outsize.cli.text import doctor_text
    from outsize.doctor.examine import examine
    from outsize.doctor.facts import Facts
    from outsize.doctor.finding import SEVERITIES
    from outsize.doctor.run_record import read_run
    from outsize.errors import ConfigError
    from outsize.hardware import machine_file as files

    output = Output(as_json=as_json)
    with output.guarded():
        recorded = read_run(run) if run else None
        if beside and recorded is None:
            raise ConfigError(
                "--beside compares with a run: name that one first, outsize doctor RUN --beside RUN"
            )
        others = tuple(read_run(other) for other in beside or ())
        probed = files.read(machine_file) if machine_file else None
        if recorded is None and probed is None:
            from outsize.probing.effort import QUICK
            from outsize.probing.run_probe import probe

            probed = probe(QUICK, [Path()], announce=lambda name, *_: output.say(f"probing: {name}"))
        report = examine(Facts(probed=probed, recorded=recorded, others=others))
        output.emit(asdict(report))
        output.print_result(doctor_text.describe(report))
    if fail_on != "never":
        failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
        if any(finding.severity in failing for finding in report.findings):
            raise typer.Exit(1)
