"""The commands as functions, for scripts and notebooks: what each of them does and returns is what its command does.

A run is said as a `Config`, as the path of a YAML file, or as a mapping of sections. A function imports what it needs
when it is called, so importing `outsize` stays free of torch.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.config import Config, load_config, parse_config

if TYPE_CHECKING:
    from outsize.hardware.machine_file import MachineFile
    from outsize.planner.search.step_plan import Plan
    from outsize.training.loop import Progress
    from outsize.training.records import TrainResult, VerifyResult

Run = Config | str | Path | Mapping[str, Any]
Announce = Callable[[str], None]


def train(
    run: Run, *, progress: "Progress | None" = None, announce: Announce = lambda _: None
) -> "TrainResult":
    """Train as ``run`` says, and return what came of it.

    Args:
        run: the configuration, a YAML file with it, or a mapping of its sections.
        progress: called with the record of each step.
        announce: called with lines for people.

    Raises:
        OutsizeError: the run cannot start, or a step failed; what was saved before stays.
    """
    from outsize.objectives.recipes import training_of

    config = config_of(run, announce)
    return training_of(config)(config, progress=progress, announce=announce)


def verify(run: Run, *, announce: Announce = lambda _: None) -> "VerifyResult":
    """Train the steps of ``run`` streamed and resident from the same weights, and compare them bit for bit.

    Raises:
        OutsizeError: as `train`.
    """
    from outsize.training.short_runs import verify as verify_run

    return verify_run(config_of(run, announce), announce=announce)


def plan(run: Run) -> "Plan":
    """Return the plan that `train` would follow on this machine: memory by tier, program, bytes per step.

    Raises:
        OutsizeError: what would keep the run from starting; an `InfeasiblePlanError` says which memory is too small.
    """
    from outsize.training.forecast import plan as plan_run

    return plan_run(config_of(run))


def probe(directories: Sequence[str | Path] = (".",), *, full: bool = False) -> "MachineFile":
    """Time what this machine does: memory, optimizer, disks, compute, links; its ``to_json`` is ``machine.json``.

    Args:
        directories: whose disks are timed; nothing stays there.
        full: take up to 3 minutes instead of up to 15 seconds.

    Raises:
        OutsizeError: a directory cannot be written.
    """
    from outsize.probing.effort import FULL, QUICK
    from outsize.probing.run_probe import probe as run_probe

    return run_probe(FULL if full else QUICK, [Path(directory) for directory in directories])


def report(run_dir: str | Path, *others: str | Path, output: str | Path | None = None) -> Path:
    """Write one HTML page of a run, or of several beside each other, that loads nothing; return its path.

    Args:
        run_dir: directory of the run.
        others: of runs to compare it with.
        output: file of the page; None for ``report.html`` in ``run_dir``.

    Raises:
        ConfigError: a directory holds no run.
        StorageError: the page cannot be written.
    """
    from outsize.reporting.collect import collect
    from outsize.reporting.html_page import make_page, page_data, write_page

    path = Path(output) if output is not None else Path(run_dir) / "report.html"
    write_page(path, make_page(page_data([collect(Path(each)) for each in (run_dir, *others)])))
    return path


def export(
    run_dir: str | Path,
    out_dir: str | Path,
    *,
    merge: bool = False,
    trust_remote_code: bool = False,
    base: str | None = None,
) -> Path:
    """Write the best checkpoint of a run, else the newest, in Hugging Face's form or PEFT's; return its directory.

    Args:
        run_dir: directory of the run.
        out_dir: where to; must not exist, or be empty.
        merge: of a LoRA run, write the whole model with the adapters merged in.
        trust_remote_code: let code that comes with the model run while it is merged.
        base: of a LoRA run, path or hub id of its model, where that is not where the run had it.

    Raises:
        CheckpointError: the run has no checkpoint, or there is nothing to merge.
        ModelError: the adapters cannot be merged.
        StorageError: ``out_dir`` cannot be written.
    """
    from outsize.checkpoint.checkpoint_state import exported
    from outsize.checkpoint.export import write_export

    source, target = exported(Path(run_dir)), Path(out_dir)
    return write_export(source, target, merge=merge, trust_remote_code=trust_remote_code, base=base)


def config_of(run: Run, announce: Announce = lambda _: None) -> Config:
    """Return the configuration that ``run`` says, with the saved model of a run or of adapters that it names.

    Raises:
        OutsizeError: a key or a value that cannot be, or a run that has saved nothing.
    """
    from outsize.checkpoint.begun_adapters import with_saved_model

    if not isinstance(run, Config):
        run = parse_config(run) if isinstance(run, Mapping) else load_config(Path(run))
    return with_saved_model(run, announce)
