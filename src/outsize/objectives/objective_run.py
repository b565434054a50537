"""A run by a trainer of another library, from its configuration to its result.

1. Records are read, and models opened, streamed, in the run's own directory.
2. The trainer is made, with what the configuration says.
3. One forward of the longest record, in a whole batch, has the step planned: what does not fit is known before the
   first step, and the plan serves all that follow.
4. The trainer trains. Heartbeat, plan and timeline are those of `outsize.wrap`; checkpoints are the trainer's.
"""

import contextlib
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outsize import files
from outsize.accelerators import Devices, module_of
from outsize.checkpoint import run_checkpoint
from outsize.checkpoint.checkpoint_state import CHECKPOINTS, best, latest, remove_litter
from outsize.checkpoint.files.checkpoint_files import stop_at
from outsize.checkpoint.saver import check_saves, state_bytes, weight_bytes
from outsize.checkpoint.trainer_checkpoint import is_trainers
from outsize.choices import OBJECTIVES_OF
from outsize.compat.transformers_private import forget_metrics, on_device, use_one_device
from outsize.config import Config, DataConfig, Surroundings, dump_config
from outsize.errors import ConfigError, OutsizeError
from outsize.group.gloo import launched
from outsize.objectives.objective_data import PackedRows, Prepared, prepare_data, tell_of_lengths, width_of
from outsize.objectives.objective_models import Models, open_models, store_of, streamed
from outsize.objectives.recipes import RECIPES, Recipe, imported, objective_of
from outsize.planner.search.step_plan import Plan
from outsize.session.job.model_setup import check_length
from outsize.session.process_settings import borrowed_torch
from outsize.session.run_state import changed_settings, settings_of
from outsize.storage.directory import temporary_directory
from outsize.storage.prealloc import storage_errors
from outsize.streamed.spec import devices_of
from outsize.telemetry.run_reading import lines_of, step_of
from outsize.telemetry.writers import Writers, open_writers
from outsize.training.defaults import settle
from outsize.training.evaluation import Aftermath, Interrupt
from outsize.training.loop import Progress
from outsize.training.measures import resident_memory, stall_share
from outsize.training.records import HEARTBEAT, TrainResult, write_whole
from outsize.training.run_data import files_of
from outsize.training.run_dir import CONFIG_FILE, as_before, choose_run_dir, claimed, config_of
from outsize.wrapped.loop_records import Known
from outsize.wrapped.module import is_wrapped, runner_of

Announce = Callable[[str], None]
# What a run that goes on has to have in common with the run so far.
_THE_SAME = (
    *("model.path", "train.method", "train.seed", "train.tokens_per_step", "train.batch_size", "eval.split"),
    *(
        f"data.{key}"
        for key in DataConfig.model_fields
        if key not in ("prefetch", "workers", "max_bad_records")
    ),
)
# Of these, what says where something lies, and may have moved where a checkpoint is gone on from elsewhere.
_PLACES = ("model.path", "data.path", "data.template", "data.more")


def train(
    config: Config, *, progress: Progress | None = None, announce: Announce = lambda _: None
) -> TrainResult:
    """Train as ``config`` says, by a trainer over a streamed model; see `outsize.training.run.train`.

    Raises:
        OutsizeError: the run cannot start, or a step failed. What was saved before stays.
    """
    objective = objective_of(config)
    assert objective is not None
    with storage_errors(), Interrupt(announce) as interrupt:
        interrupt.doing = "records were read and models opened"
        return _train(config, objective, interrupt, progress, announce)


def foresee(config: Config, announce: Announce = lambda _: None) -> dict[str, Plan]:
    """Return the plans of a run by a trainer, by model, without starting it: weights are left as they are, zeros.

    Raises:
        OutsizeError: what would keep the run from starting.
    """
    objective = objective_of(config)
    assert objective is not None
    run_dir = choose_run_dir(config.train.run_dir)
    config = settle(config, run_dir, announce, objective=objective).config
    with contextlib.ExitStack() as stack:
        trainer, models = _opened(stack, config, objective, run_dir, announce)
        _rehearse(trainer)
        return {name: plan for name, model in models.named() if (plan := runner_of(model).plan) is not None}


def _train(
    config: Config, objective: str, interrupt: Interrupt, progress: Progress | None, announce: Announce
) -> TrainResult:
    from outsize.objectives.objective_trainer import Following

    run_dir = choose_run_dir(config.train.run_dir)
    resumed = run_checkpoint.find(config.train.resume, run_dir)
    config = settle(config, run_dir, announce, resumed=resumed, objective=objective).config
    config = as_before(config, run_dir, resumed, announce=announce)
    _check_goes_on(config, run_dir, resumed, announce)
    done = 0 if resumed is None else run_checkpoint.position_of(resumed).step
    if config.train.epochs is None and done >= config.train.steps:
        announce(f"{resumed} has {done} of {config.train.steps} steps: nothing is left to do")
        return _result(run_dir, done, {"steps": done, "num_steps": config.train.steps, "budget_bytes": 0})
    with claimed(run_dir, config):  # as by the records of the model, later on
        files.system().remove_tree(store_of(config, run_dir))  # what a process that was killed has left
    following = Following(config, interrupt, announce, progress, RECIPES[objective].has_perplexity)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_litter, run_dir / CHECKPOINTS)
        known_run = Known(config, done, following.complete)
        trainer, models = _opened(stack, config, objective, run_dir, announce, known_run)
        following.trainer = trainer
        following.steps_per_epoch = math.ceil(len(trainer.train_dataset) / config.sequences_per_step)
        named = open_writers(
            config.telemetry.writers, run_dir, config.telemetry.project, config.model_dump(mode="json")
        )
        following.writers = stack.enter_context(Writers(named, config.telemetry.every, announce))
        trainer.add_callback(following)
        write_whole(run_dir / CONFIG_FILE, dump_config(config))
        _rehearse(trainer)
        _check_room(config, models, run_dir, announce)
        interrupt.finish = lambda: (
            "the run ends after the step under way, and saves; a second one stops it at once"
        )
        if resumed is not None:
            announce(f"resumed from {resumed.name}")
        stack.enter_context(Aftermath(run_dir, announce)).begun = True
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
        figures = {
            "steps": trainer.state.global_step,
            "num_steps": trainer.state.max_steps,
            "eval_loss": following.eval_loss,
            "stopped_early": following.stopped_early,
            "budget_bytes": sum(runner_of(m).session.machine.device_bytes for _, m in models.named()),
        }
    return _result(run_dir, done, figures)


def _opened(
    stack: contextlib.ExitStack,
    config: Config,
    objective: str,
    run_dir: Path,
    announce: Announce,
    known_run: Known | None = None,
) -> tuple[Any, Models]:
    """Return the trainer of a run, and its models, without weights where no ``known_run`` is given."""
    recipe = RECIPES[objective]
    place = launched()
    if place is not None and place.size > 1:
        raise ConfigError(f"train.objective={objective} trains in one process; start it without torchrun")
    kinds = imported(recipe.trainer, objective), imported(recipe.arguments, objective)
    devices = devices_of(config.memory)
    deterministic = config.train.deterministic and known_run is not None
    stack.enter_context(borrowed_torch(deterministic=deterministic, devices=devices))
    stack.enter_context(_quiet())
    for note in config.notes(Surroundings(device=str(devices), by_trainer=True)):
        announce(f"note: {note}")
    model = files_of(config)
    check_length(config.data.seq_len, model.hf_config)
    own_dir = run_dir if known_run else stack.enter_context(temporary_directory())
    data = prepare_data(config, objective, recipe, model, (stack, own_dir), announce)
    torch.manual_seed(config.train.seed)
    models = open_models(stack, config, devices, recipe, data.changes, run_dir, empty=known_run is None)
    if known_run is not None and is_wrapped(streamed(models.trained)):
        runner_of(streamed(models.trained)).record(run_dir, known_run)
    models.trained.config.pad_token_id = data.tokenizer.pad_token_id  # type: ignore[union-attr]
    if (generation := getattr(streamed(models.trained), "generation_config", None)) is not None:
        stop_at(data.reply_end, data.tokenizer, generation, announce)
    _check_that_it_saves(models.trained, data.tokenizer)
    with _refused_as_configuration(objective):
        arguments = _arguments(config, objective, recipe, kinds[1], own_dir, devices)
        trainer = _trainer(config, recipe, kinds[0], arguments, data, models)
    tell_of_lengths(config, trainer.train_dataset, data.rows, announce)
    return trainer, models


def _check_that_it_saves(model: Any, tokenizer: Any) -> None:
    """Write what is small of a checkpoint, and throw it away: what a save finds fault with is known beforehand."""
    with temporary_directory() as directory:
        for what, part in ("config.json", model.config), ("the tokenizer", tokenizer):
            try:
                part.save_pretrained(directory)
            except Exception as error:  # of libraries, which raise a dozen kinds
                first_line = str(error).strip().partition("\n")[0]
                raise ConfigError(
                    f"model.path: {what} could be read, and cannot be written: {first_line}; mend it in the directory "
                    "of the model"
                ) from error


def _trainer(
    config: Config, recipe: Recipe, kind: type, arguments: Any, data: Prepared, models: Models
) -> Any:
    from transformers import PrinterCallback, ProgressCallback

    from outsize.objectives.objective_trainer import NoReference, by_config

    more: dict[str, Any] = {} if data.collate is None else {"data_collator": data.collate}
    if recipe.compares:
        more["ref_model"] = models.frozen if models.adapters is None else NoReference(models.trained)
    trainer = by_config(kind)(
        model=models.trained,
        args=arguments,
        train_dataset=data.rows,
        eval_dataset=data.measured,
        processing_class=data.tokenizer,
        **more,
    )
    if recipe.compares and models.adapters is not None:
        trainer.ref_model = None  # then TRL compares with the model without its adapters
    for callback in (PrinterCallback, ProgressCallback):  # stdout is for the result
        trainer.remove_callback(callback)
    teacher, train = data.teacher or models.frozen, config.train
    settings = {"beta": train.beta, "temperature": train.temperature, "teacher": teacher}
    for name, value in () if recipe.by_trl else settings.items():
        if value is not None:
            setattr(trainer, name, value)
    trainer.config = config
    return trainer


def _arguments(
    config: Config, objective: str, recipe: Recipe, kind: Any, run_dir: Path, devices: Devices
) -> Any:
    train, optimizer = config.train, config.optimizer
    if devices.accelerated:
        module_of(devices.kind).set_device(devices.index)
    settings: dict[str, Any] = {
        "output_dir": str(run_dir / CHECKPOINTS),
        "per_device_train_batch_size": config.sequences_per_step,
        "per_device_eval_batch_size": config.sequences_per_step,
        "learning_rate": optimizer.lr,
        "max_grad_norm": 0.0 if optimizer.clip == "none" else optimizer.max_grad_norm,
        "seed": train.seed % 2**32,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "save_total_limit": train.save_total_limit,
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": not devices.accelerated,
        "dataloader_pin_memory": False,  # WSL2's driver refuses that once it has pinned little, and the run would end
        "prediction_loss_only": True,
    }
    settings |= {"max_steps": train.steps} if train.epochs is None else {"num_train_epochs": train.epochs}
    if recipe.by_trl:
        settings |= {"max_length": config.data.seq_len, "gradient_checkpointing": False}
        if train.beta is not None and objective in OBJECTIVES_OF["beta"]:
            settings["beta"] = train.beta
    else:
        settings |= {"remove_unused_columns": False}
        settings |= {"label_names": ["input_ids"]} if objective == "embed" else {}
    arguments = kind(**settings)
    use_one_device(arguments)
    return arguments


def _rehearse(trainer: Any) -> None:
    """Have a step planned for the longest record, in a whole batch, and forget what came of it."""
    if not is_wrapped(streamed(trainer.model)):
        return
    rows = trainer.train_dataset
    longest = rows[0] if isinstance(rows, PackedRows) else max(rows, key=width_of)
    count = min(trainer.args.per_device_train_batch_size, len(rows))
    trainer.create_optimizer()
    trainer.model.train()
    with torch.random.fork_rng(devices=[]), _refused_as_configuration(trainer.config.train.objective):
        batch = trainer.data_collator([dict(longest) for _ in range(count)])
        trainer.compute_loss(trainer.model, on_device(trainer, batch))
    forget_metrics(trainer)


def _check_room(config: Config, models: Models, run_dir: Path, announce: Announce) -> None:
    """Refuse a run whose checkpoints find no room; its homes are there by now."""
    if is_wrapped(model := streamed(models.trained)):
        runner = runner_of(model)
        weights = weight_bytes(runner.split.spec, adapters=models.adapters is not None)
        state = state_bytes(runner.split.spec, runner.state, masters=False)
        check_saves(weights + state, config.train, run_dir, announce)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep off the console what libraries draw, and say of what they will call otherwise one day."""
    from transformers.utils import logging

    bars: list[tuple[Callable[[], bool], Callable[[], None], Callable[[], None]]] = [
        (logging.is_progress_bar_enabled, logging.disable_progress_bar, logging.enable_progress_bar)
    ]
    with contextlib.suppress(ImportError):
        sets: Any = importlib.import_module("datasets")
        bars.append(
            (
                lambda: not sets.are_progress_bars_disabled(),
                sets.disable_progress_bars,
                sets.enable_progress_bars,
            )
        )
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore", FutureWarning)
        for is_shown, hide, show in bars:
            if is_shown():
                hide()
                stack.callback(show)
        yield


@contextlib.contextmanager
def _refused_as_configuration(objective: str) -> Iterator[None]:
    """Raise what a trainer refuses, when it is made or tried, as an error of the configuration."""
    try:
        yield
    except OutsizeError:
        raise
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"train.objective={objective}: {error}") from error


def _check_goes_on(config: Config, run_dir: Path, resumed: Path | None, announce: Announce) -> None:
    """Check that a run goes on with the run that its directory holds, or from a checkpoint of a ``Trainer``.

    What may change and trains otherwise is announced.
    """
    if resumed is not None and not is_trainers(resumed):
        raise ConfigError(
            f"train.resume: {resumed} is a checkpoint of the engine's, and this run is a trainer's of another library; "
            "begin from its weights with model.path, and leave train.resume out"
        )
    place = None if resumed is None else resumed.resolve().parent
    is_elsewhere = config.train.resume != "auto"
    if is_elsewhere and (place is None or place.name != CHECKPOINTS):
        return
    run = place.parent if is_elsewhere and place is not None else run_dir
    before = config_of(run)
    if before is None:
        return
    for key in _THE_SAME:
        section, _, name = key.partition(".")
        was, now = (getattr(getattr(each, section), name) for each in (before, config))
        if was != now and not (is_elsewhere and key in _PLACES):
            raise ConfigError(
                f"{key}: the run in {run} has {was!r}, and cannot go on with {now!r}; leave it as it was, or "
                "choose another train.run_dir"
            )
    if resumed is not None:
        for line in changed_settings({"settings": settings_of(before)}, config):
            announce(line)


def _result(run_dir: Path, first: int, figures: dict[str, Any]) -> TrainResult:
    """Return what the steps after ``first`` came to, from their lines in the heartbeat."""
    by_number = {}
    with contextlib.suppress(ConfigError):  # what is trained and saved does not fail for want of its records
        for line in map(step_of, lines_of(run_dir / HEARTBEAT)):
            if line is not None and line["step"] > first:
                by_number[line["step"]] = line
    steps = list(by_number.values())
    seconds = sum(step["seconds"] for step in steps)
    stalled: dict[str, float] = {}
    for step in steps:
        for lane, waited_s in step.get("stall_s", {}).items():
            stalled[lane] = stalled.get(lane, 0.0) + waited_s
    saved, chosen = latest(run_dir), best(run_dir)
    final = [step for step in steps if step.get("loss") is not None]
    return TrainResult(
        **{
            "loss": final[-1]["loss"] if final else math.nan,
            "tokens_per_s": sum(step.get("tokens", 0) for step in steps) / seconds if seconds else 0.0,
            "peak_rss_bytes": resident_memory()[1],
            "stall_share": stall_share(stalled, seconds),
            "stall_owner": max(stalled, key=lambda lane: stalled[lane], default=None),
            "bytes_read": sum(step.get("bytes_read") or 0 for step in steps),
            "bytes_written": sum(step.get("bytes_written") or 0 for step in steps),
            "run_dir": str(run_dir),
            "export_dir": None if saved is None else str(saved),
            "best_dir": None if chosen is None else str(chosen),
            **figures,
        }
    )
