"""``outsize plan``: what training a model on a machine would take, predicted without the model or the machine."""

import contextlib
import gc
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli.console import Output
from outsize.cli.inspect import Dtype
from outsize.cli.options import JsonOption

if TYPE_CHECKING:
    from outsize.cli.plan_question import Asked
    from outsize.planner.prediction import Prediction
    from outsize.planner.what_if import Outcome


class Method(StrEnum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"


class Home(StrEnum):
    """Where weights and optimizer state rest."""

    AUTO = "auto"
    HOST = "host"
    DISK = "disk"


class NetGradients(StrEnum):
    """How gradients are written between nodes."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT8_EF = "int8-ef"
    INT8_STOCHASTIC = "int8-stochastic"
    INT4_EF = "int4-ef"


class NetWeights(StrEnum):
    """How weights that have stepped are written between nodes."""

    RAW = "raw"
    DELTA = "delta"


class Clip(StrEnum):
    """Which norm is clipped."""

    GLOBAL = "global"
    UNIT = "unit"
    NONE = "none"


class Optimizer(StrEnum):
    """How a parameter steps."""

    ADAMW = "adamw"
    SGD = "sgd"
    LION = "lion"


class State(StrEnum):
    """What moments are kept in."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


class MastersOption(StrEnum):
    """How masters lie beside weights."""

    AUTO = "auto"
    SEPARATE = "separate"
    SPLIT = "split"


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, bare config.json, or hub id.")
    ],
    gpus: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="GPUs and a usual host, e.g. 4090, 8x4090, 2xh100.")
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Description of a machine, JSON, instead of --gpus.")
    ] = None,
    method: Annotated[
        Method, typer.Option(help="What is trained: all parameters, or LoRA adapters.")
    ] = Method.FULL,
    lora_r: Annotated[int, typer.Option(help="Rank of the adapters.")] = 8,
    lora_modules: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Adapted layers, e.g. q_proj,v_proj (default) or all-linear."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Compute dtype.")] = Dtype.BF16,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens per sequence; default: 2048, or what the model has positions for."),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            help="Tokens per optimizer step, a multiple of --seq-len; default: 64 sequences, or as many as fit."
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Slices of a step; default: the fastest predicted.")
    ] = None,
    home: Annotated[Home, typer.Option(help="Where the training state rests.")] = Home.AUTO,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory of the machine, e.g. 64GB, if not as usual."),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget on each GPU; default: 90 % of it.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget in host memory; default: 80 % of it.")
    ] = None,
    max_grad_norm: Annotated[
        float,
        typer.Option(help="Global norm that gradients are clipped to; 0 is off, and steps overlap more."),
    ] = 1.0,
    clip: Annotated[
        Clip, typer.Option(help="Norm that is clipped: of all gradients, of each unit's, or none.")
    ] = Clip.GLOBAL,
    optimizer: Annotated[
        Optimizer, typer.Option(help="AdamW with two moments, or SGD or Lion with a momentum.")
    ] = Optimizer.ADAMW,
    optimizer_state: Annotated[
        State, typer.Option(help="What moments are kept in; bf16 and int8 take less memory and round.")
    ] = State.FP32,
    masters: Annotated[
        MastersOption,
        typer.Option(help="How fp32 masters lie beside bf16 weights: split takes 4.13 bytes, not 6."),
    ] = MastersOption.AUTO,
    nodes: Annotated[int, typer.Option(help="Machines like this one that share each step.")] = 1,
    net: Annotated[
        str | None, typer.Option(metavar="RATE", help="Network of each node, e.g. 25Gb (bits) or 3GB.")
    ] = None,
    net_gradients: Annotated[
        NetGradients, typer.Option(help="How gradients are written between nodes.")
    ] = NetGradients.FP32,
    net_weights: Annotated[
        NetWeights, typer.Option(help="How weights that have stepped are written between nodes.")
    ] = NetWeights.RAW,
    largest: Annotated[
        bool, typer.Option("--largest", help="Also find the largest models of this family that fit.")
    ] = False,
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Tokens to train on, e.g. 10B, for the time it takes.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help="vram=+8GB, ram=+64GB, state=int8, link=x2, compute=x2, bandwidth=x2, disk=x2, net=x2, gpus=+1, "
            "nodes=+1.",
        ),
    ] = None,
    advice: Annotated[bool, typer.Option(help="Also predict what would help.")] = True,
    data: Annotated[str, typer.Option(help="Data that --output names; it is not read.")] = "data",
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the simulated steps for Perfetto.")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write a train.yaml for `outsize train`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict memory, speed and what would help, from a config.json and the figures of a machine.

    Needs no GPU and no weights; every figure is a prediction, and the assumptions behind it are printed.
    """
    from outsize.cli import plan_question, plan_table

    output = Output(as_json=as_json)
    with output.guarded():
        asked = plan_question.ask_what_fits(
            model,
            gpus=gpus,
            machine=machine,
            method=method.value,
            lora_r=lora_r,
            lora_modules=lora_modules,
            nodes=nodes,
            net=net,
            wire=(net_gradients.value, net_weights.value),
            dtype=dtype.value,
            seq_len=seq_len,
            tokens_per_step=tokens_per_step,
            microbatches=microbatches,
            home=home.value,
            ram=ram,
            device_memory=device_memory,
            host_memory=host_memory,
            max_grad_norm=max_grad_norm,
            clip=clip.value,
            optimizer=optimizer.value,
            optimizer_state=optimizer_state.value,
            masters=masters.value,
            tokens=tokens,
            data=data,
        )
        prediction, outcomes, helps = _answer(asked, what_if or [], advice, output)
        with _uncollected():
            scaled = plan_question.largest_models(asked) if largest else ()
        _write(asked, prediction, timeline, output_file)
        output.emit(plan_table.to_dict(asked, prediction, outcomes, helps, scaled))
        output.print_result(plan_table.render(asked, prediction, outcomes, helps, scaled))


def _answer(
    asked: "Asked", changes: list[str], advice: bool, output: Output
) -> "tuple[Prediction, list[Outcome], list[Outcome]]":
    """Return the prediction, what the changes that were asked about would bring, and what the usual ones would.

    Raises:
        ConfigError: something that is no change.
        InfeasiblePlanError: nothing fits; what the changes would bring has been said.
    """
    from outsize.cli import plan_table
    from outsize.errors import InfeasiblePlanError
    from outsize.planner.search import fastest
    from outsize.planner.what_if import estimated_outcome, outcome, parse_change, usual_changes

    for change in changes:
        parse_change(change)
    with _uncollected():
        try:
            prediction = fastest(asked.question)
        except InfeasiblePlanError:
            for found in (outcome(asked.question, None, change) for change in changes):
                output.say(f"what if {found.change}: {plan_table.in_short(found)}")
            raise
        usual = usual_changes(asked.question, prediction) if advice else ()
        outcomes = [outcome(asked.question, prediction, change) for change in changes]
        # A step of several GPUs takes a second to simulate; what would help is told from estimates then, which know
        # links and host memory, but no disk.
        estimated = prediction.num_gpus > 1 and prediction.home == "host"
        judge = estimated_outcome if estimated else outcome
        helps = [judge(asked.question, prediction, change) for change in usual if change not in changes]
    return prediction, outcomes, helps


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage: what planners make has no cycles, and looking takes a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _write(asked: "Asked", prediction: "Prediction", timeline: Path | None, config: Path | None) -> None:
    """Write the files that were asked for.

    Raises:
        StorageError: one cannot be written.
    """
    import json

    from outsize.cli import plan_question
    from outsize.errors import StorageError
    from outsize.report.chrome import to_chrome

    texts = {}
    if timeline is not None:
        texts[timeline] = json.dumps(to_chrome(prediction.timeline))
    if config is not None:
        texts[config] = plan_question.train_yaml(asked, prediction)
    for path, text in texts.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error
