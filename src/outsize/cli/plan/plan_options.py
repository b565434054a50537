"""What can be asked of ``outsize plan``, option by option."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_type_hints

import typer

from outsize.choices import Clip, Compile, ComputeDtype, Home, MastersOrAuto, Method, Moments, NewtonSchulz
from outsize.codecs.codec_spec import FrozenCodec, TransportWeights, WireGradients
from outsize.errors import ConfigError, DataError

# What writing text does not have.
OF_TRAINING: Final = frozenset(
    (
        *("tokens_per_step", "microbatches", "mlp_parts", "head_chunk_tokens", "commits", "resident"),
        *("max_grad_norm", "clip", "optimizer", "optimizer_state", "ns_on", "masters", "transport_weights"),
        *("disk_write", "nodes", "net", "net_gradients", "largest", "compare", "what_if"),
        *("data", "tokens", "epochs", "timeline", "output_file"),
    )
)


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The options of the command; the text of each is its documentation."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model directory, bare config.json, hub id, or a run's YAML file."
        ),
    ]
    gpus: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="GPUs and a usual host, e.g. 4090, 8x4090, 2xh100.")
    ] = None
    gpu_spec: Annotated[
        str | None,
        typer.Option(
            metavar="FIGURES", help="A GPU of no list: memory=24GB,tflops=165,gbps=1008,pcie=4x16,count=2."
        ),
    ] = None
    kernels: Annotated[
        Literal["eager", "fused", "liger"] | None,
        typer.Option(
            help="What computes: eager blocks (default) or fused kernels, a rate of products each; or model.kernels."
        ),
    ] = None
    products: Annotated[
        Literal["native", "fp8"],
        typer.Option(help="What linear layers of blocks multiply in: the compute dtype, or fp8."),
    ] = "native"
    compile: Annotated[
        Compile, typer.Option(help="What the run compiles; priced where a gain is known, else told.")
    ] = "off"
    machine: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A machine instead of --gpus: JSON of outsize probe, or YAML in words."
        ),
    ] = None
    method: Annotated[Method, typer.Option(help="What is trained: all parameters, or LoRA adapters.")] = (
        "full"
    )
    lora_r: Annotated[int, typer.Option(help="Rank of the adapters.")] = 8
    lora_modules: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Adapted layers, e.g. q_proj,v_proj (default) or all-linear."),
    ] = None
    lora_parameters: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Adapted experts, e.g. experts.gate_up_proj,experts.down_proj."),
    ] = None
    base_codec: Annotated[
        FrozenCodec, typer.Option(help="How the frozen model under adapters is held, e.g. nf4 (QLoRA).")
    ] = "raw"
    dtype: Annotated[ComputeDtype, typer.Option(help="Compute dtype.")] = "bf16"
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens per sequence; default: 2048, or what the model has positions for."),
    ] = None
    image: Annotated[
        str | None,
        typer.Option(
            metavar="WxH", help="Pixels of the image of a sample, of models that make or read them."
        ),
    ] = None
    frames: Annotated[int | None, typer.Option(help="Frames of a sample, of a video model.")] = None
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            help="Tokens per optimizer step, a multiple of --seq-len; default: 64 sequences, or as many as fit."
        ),
    ] = None
    microbatches: Annotated[
        int | None, typer.Option(help="Slices of a step; default: the fastest predicted.")
    ] = None
    mlp_parts: Annotated[
        int, typer.Option(help="Parts in which an MLP takes the tokens of a microbatch; less memory.")
    ] = 1
    head_chunk_tokens: Annotated[
        int, typer.Option(help="Tokens that the head takes at a time; fewer take less memory.")
    ] = 512
    home: Annotated[Home, typer.Option(help="Where the training state rests.")] = "auto"
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory of the machine, e.g. 64GB, if not as usual."),
    ] = None
    cpu_cores: Annotated[int | None, typer.Option(help="Cores of the host, which step the optimizer.")] = None
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Free space of the disk, e.g. 2TB; none for no disk.")
    ] = None
    disk_read: Annotated[str | None, typer.Option(metavar="RATE", help="Reads of the disk, e.g. 7GB.")] = None
    disk_write: Annotated[str | None, typer.Option(metavar="RATE", help="Writes of the disk, e.g. 6GB.")] = (
        None
    )
    commits: Annotated[
        Literal["step", "none"], typer.Option(help="When a home on disk commits; none takes half the disk.")
    ] = "step"
    resident: Annotated[
        str,
        typer.Option(
            metavar="N", help="Units that stay on the GPU with their state: auto, none, or how many."
        ),
    ] = "auto"
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget on each GPU; default: 90 % of it.")
    ] = None
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget in host memory; default: 80 % of it.")
    ] = None
    max_grad_norm: Annotated[
        float,
        typer.Option(help="Global norm that gradients are clipped to; 0 is off, and steps overlap more."),
    ] = 1.0
    clip: Annotated[
        Clip, typer.Option(help="Norm that is clipped: of all gradients, of each unit's, or none.")
    ] = "global"
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="adamw, muon, or a class of torch.optim by name, e.g. SGD or Adafactor."
        ),
    ] = "adamw"
    optimizer_state: Annotated[
        Moments, typer.Option(help="What moments are kept in; bf16 and int8 take less memory and round.")
    ] = "fp32"
    ns_on: Annotated[
        NewtonSchulz,
        typer.Option(help="Where Muon multiplies matrices; auto: on the GPU if that shortens a step."),
    ] = "auto"
    masters: Annotated[
        MastersOrAuto,
        typer.Option(
            help="How fp32 masters lie beside bf16 weights: split takes 4.13 bytes, not 6; split24 3."
        ),
    ] = "auto"
    transport_weights: Annotated[
        TransportWeights,
        typer.Option(help="How weights go over links, bit for bit; auto: encoded if that shortens a step."),
    ] = "raw"
    nodes: Annotated[int, typer.Option(help="Machines like this one that share each step.")] = 1
    net: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Network of each node: 25Gb (bits), 3GB, or a file of `outsize all-reduce`."
        ),
    ] = None
    net_gradients: Annotated[WireGradients, typer.Option(help="How gradients are written between nodes.")] = (
        "fp32"
    )
    largest: Annotated[
        bool,
        typer.Option(
            "--largest", help="Also find the largest model that fits with more layers of this one's."
        ),
    ] = False
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also tell what DDP, ZeRO-3 or FSDP, tensor and pipeline parallelism can do."
        ),
    ] = False
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Tokens to train on, e.g. 10B, for the time it takes.")
    ] = None
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help="vram=+8GB, ram=+64GB, state=int8, link=x2, compute=x2, bandwidth=x2, disk=x2, net=x2, gpus=+1, "
            "nodes=+1, home=disk.",
        ),
    ] = None
    full: Annotated[
        bool,
        typer.Option("--full", help="Also show memory by class, waits, and every figure with its source."),
    ] = False
    advice: Annotated[bool, typer.Option(help="Also predict what would help.")] = True
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Data to train on: counted, for the time of --epochs.")
    ] = None
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Times that --data is trained on; 1 where that is there.")
    ] = None
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the simulated steps for Perfetto.")
    ] = None
    generate: Annotated[
        bool,
        typer.Option(
            "--generate",
            help="Ask about writing text instead of training, behind prompts of --seq-len tokens.",
        ),
    ] = False
    batch_size: Annotated[int, typer.Option(help="Of --generate: texts that are written at once.")] = 1
    max_new_tokens: Annotated[
        int, typer.Option(help="Of --generate: tokens to write behind each prompt.")
    ] = 128
    named: frozenset[str] = frozenset()
    output_file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write a train.yaml for `outsize train`.")
    ] = None


def check_question(options: PlanFlags) -> None:
    """Refuse options that the question asked does not have.

    Raises:
        ConfigError: an option is of training, and writing is asked about, or the other way round.
    """
    if options.generate:
        others, whose = OF_TRAINING, "of training; leave it out with --generate"
    else:
        others = frozenset(("batch_size", "max_new_tokens"))
        whose = "of --generate; a step of training has --tokens-per-step"
    if wrong := sorted(others & options.named):
        names = ", ".join(f"--{name.removesuffix('_file').replace('_', '-')}" for name in wrong)
        raise ConfigError(f"{names}: {whose}")


def check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse a value that the command line could not have given to the option.

    Raises:
        ConfigError: names it.
    """
    from pydantic import TypeAdapter, ValidationError

    kinds = get_type_hints(PlanFlags)
    for name, value in given.items():
        try:
            TypeAdapter(kinds[name]).validate_python(value, strict=True)
        except ValidationError as error:
            should = error.errors()[0]["msg"].removeprefix("Input ")
            raise ConfigError(
                f"{name}={value!r}: it {should}, as --{name.replace('_', '-')} of outsize plan takes it"
            ) from None


def sized_by_records(options: PlanFlags, model_path: str, positions: int | None) -> PlanFlags:
    """Return options with the sequences and steps that `outsize train` chooses by chats and prompts."""
    data, step = Path(options.data or ""), options.tokens_per_step
    named = options.named & {"image", "frames", *(("microbatches",) if step is None else ())}
    if named or not data.name or not data.exists() or options.nodes > 1:
        return options
    from outsize.data.reading.record_lengths import count_data, length_for, sequences_for

    try:
        lengths = (counted := count_data(data, Path(model_path))).lengths
    except DataError:
        if options.tokens is None:
            raise
        return options
    if not lengths:
        return options
    parts = step, options.microbatches or 1
    seq_len = options.seq_len or length_for(lengths, positions or 2**62, *parts)
    step = step or seq_len * sequences_for(counted.num_records, sum(lengths) / len(lengths) / seq_len)
    epochs = options.epochs or (1 if options.tokens is None else None)
    return replace(options, seq_len=seq_len, tokens_per_step=step, epochs=epochs)
