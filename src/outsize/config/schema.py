"""What can be configured: nine sections, every key with its default, its unit and its meaning.

The descriptions below are the documentation: `docs/configuration.md` and the help of the flags are made from
them. Sections hold what the user said and decide nothing; ``auto`` and null are resolved by the code that
knows the machine.
"""

import os
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from outsize.config import rules
from outsize.units import parse_bytes


def _size(value: Any) -> Any:
    """Accept ``"64MiB"`` and whole numbers of bytes; anything else fails as a size, in words."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not a size; write a number and a unit, e.g. 64MiB, 20GiB or 24GB")
    num_bytes = parse_bytes(value)
    if num_bytes <= 0:
        raise ValueError("a size must be above zero")
    return num_bytes


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _modules(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise ValueError("must be a text, or a list of names of modules")


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+(,\d+)*|:all)?|emulated(:[1-9]\d*)?", value):
        raise ValueError(
            f"not a device: {value!r}; write cpu, cuda, cuda:1, cuda:0,1, cuda:all, emulated:2 or auto"
        )
    return value


Size = Annotated[int, BeforeValidator(_size)]
PathText = Annotated[str, BeforeValidator(_path), Field(min_length=1)]
Device = Annotated[str, AfterValidator(_device)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Modules = Annotated[str | tuple[str, ...], BeforeValidator(_modules)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion from one type to another."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which model is trained, in which precision, and which of its parameters."""

    path: PathText = Field(
        description="Directory in Hugging Face layout (config.json, safetensors, tokenizer), or a hub id."
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Compute dtype; master weights are exact fp32 in any case. "
        "auto is fp32 on cpu and emulated devices, bf16 on cuda.",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        default="auto",
        description="Attention kernel; auto takes what the model offers, and the choice is logged.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether Python code that comes with the model directory may run."
    )
    freeze: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description='Patterns of parameter names that are not trained, e.g. `["*embed_tokens*"]`; '
        "`*` matches any run of characters.",
    )


class DataConfig(Section):
    """What it is trained on, and how text becomes sequences."""

    path: PathText = Field(description="A file, or a directory that is read recursively in sorted order.")
    format: Literal[
        "auto", "text", "jsonl", "messages", "prompt_completion", "alpaca", "sharegpt", "tokens", "parquet"
    ] = Field(
        default="auto",
        description="Layout of the records; auto looks at them and prints what it took them for.",
    )
    seq_len: int = Field(default=512, ge=2, description="Tokens per sequence.")
    pack: bool = Field(
        default=True,
        description="Whether documents are laid end to end so that sequences hold no padding; "
        "otherwise one document makes one sequence, padded.",
    )
    text_field: str = Field(
        default="text", min_length=1, description="Key of the text in JSONL and Parquet records."
    )
    glob: str | None = Field(
        default=None,
        min_length=1,
        description='Which files of a directory are read, e.g. `"*.py"`; null takes every known kind.',
    )


class TrainConfig(Section):
    """How long it is trained, in which portions, and where the run is kept."""

    method: Literal["full", "lora"] = Field(
        default="full",
        description="full: all parameters that model.freeze does not name; lora: adapters beside a frozen model, see "
        "section lora.",
    )
    steps: int = Field(
        default=100, ge=1, description="Optimizer steps in all, those before a resume included."
    )
    tokens_per_step: int | None = Field(
        default=None,
        ge=2,
        description="Tokens per optimizer step, a multiple of data.seq_len; "
        "null is data.seq_len x microbatches, or one sequence.",
    )
    microbatches: int | None = Field(
        default=None,
        ge=1,
        description="Slices of a step that pass through a unit one after the other; "
        "more of them need less memory for activations and move no more weights. null is as few as fit, or with "
        "several workers as many as keep them busy; the number chosen is in run_dir/config.yaml.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of data order, dropout and fresh weights; a whole number.",
    )
    run_dir: PathText | None = Field(
        default=None, description="Directory of this run; null is runs/<date and time of the start>."
    )
    loss: Literal["auto", "model", "chunked"] = Field(
        default="auto",
        description="model: the loss that the model returns; chunked: head and cross-entropy on "
        "head_chunk_tokens tokens at a time, which never holds all logits; "
        "auto: chunked where the head allows it.",
    )
    head_chunk_tokens: int = Field(default=512, ge=1, description="Tokens per chunk of the chunked loss.")
    save_every: int = Field(
        default=0,
        ge=0,
        description="Steps between checkpoints in Hugging Face layout, written beside training; 0 does not count "
        "steps. One is written at the end in any case.",
    )
    save_minutes: float | None = Field(
        default=None,
        ge=0,
        description="Minutes between checkpoints, besides those of save_every; 0 does not look at the clock. "
        "null is 30 where the state is in host memory, and 0 where its home commits every step.",
    )
    save_total_limit: int | None = Field(
        default=2,
        ge=1,
        description="Checkpoints of this run to keep; older ones are removed once a new one is safe on the disk. "
        "null keeps all.",
    )
    resume: PathText = Field(
        default="none",
        description="none starts a new run; auto continues from the last committed step or the newest checkpoint in "
        "run_dir, or starts afresh if there is none; a path continues, in a new run_dir, from that checkpoint, or from "
        "the newest one of that run; checkpoints of the Hugging Face Trainer are taken too.",
    )
    profile_steps: int = Field(
        default=0,
        ge=0,
        description="Steps, from the third of the process on, that torch.profiler records into run_dir/profile.json.",
    )
    on_nonfinite: Literal["raise", "skip"] = Field(
        default="raise",
        description="What a NaN or infinite loss or gradient does, before any weight of the step is saved: "
        "end the run, or skip the step, changing nothing, and count it.",
    )
    on_stall: Literal["abort", "report", "ignore"] = Field(
        default="abort",
        description="What becomes of a step in which nothing ends any more: report where it stands and end the run, "
        "report it and wait on, or nothing.",
    )
    stall_factor: float = Field(
        default=10.0,
        ge=1,
        description="A step is stalled if none of its ops ends for this many times the median of the steps before, or "
        "the predicted step until one was measured.",
    )
    stall_floor_s: float = Field(
        default=600.0,
        gt=0,
        description="The least time, in seconds, after which a step is taken to be stalled.",
    )
    deterministic: bool = Field(
        default=True, description="Whether only kernels are used that give the same bits in every run."
    )


class LoraConfig(Section):
    """Adapters of train.method=lora: keys, meanings and defaults are those of PEFT's LoraConfig, but for the codecs.

    Adapters are fp32; the frozen model computes in model.dtype, and is held in it where no codec says otherwise.
    """

    r: int = Field(default=8, ge=1, description="Rank of the adapters.")
    lora_alpha: int = Field(
        default=8, ge=1, description="Adapters are scaled by lora_alpha / r, or lora_alpha / sqrt(r)."
    )
    lora_dropout: Fraction = Field(default=0.0, description="Dropout on the inputs of adapters.")
    target_modules: Modules | None = Field(
        default=None,
        description="Modules that get an adapter: names or ends of names; a text is a regular expression, or "
        "all-linear for every linear layer but the head; null is PEFT's choice for the architecture.",
    )
    exclude_modules: Modules | None = Field(
        default=None, description="Modules that get none, written likewise."
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description="Biases of the model that train as well; fp32 models only."
    )
    use_rslora: bool = Field(
        default=False,
        description="Whether adapters are scaled by lora_alpha / sqrt(r) (rank-stabilised LoRA).",
    )
    modules_to_save: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="Modules that train whole and are saved with the adapters; fp32 models only.",
    )
    init_lora_weights: Literal[True, False, "gaussian"] = Field(
        default=True, description="How adapters begin; true and gaussian change nothing at the first step."
    )
    rank_pattern: dict[str, int] = Field(
        default={}, description="Ranks of modules that have another, by name."
    )
    alpha_pattern: dict[str, int] = Field(
        default={}, description="lora_alpha of modules with another, by name."
    )
    layers_to_transform: tuple[int, ...] | None = Field(
        default=None, strict=False, description="Numbers of the layers that get adapters; null is all."
    )
    layers_pattern: str | None = Field(
        default=None, description="Name of the list of layers, for layers_to_transform."
    )
    fan_in_fan_out: bool = Field(
        default=False, description="Whether weights are stored (in, out), as in GPT-2; PEFT sets it there."
    )
    base_codec: Literal["raw", "nf4", "nf4-double", "int8"] = Field(
        default="raw",
        description="How the frozen matrices of layers are held and streamed; they are decoded on the device. nf4 is "
        "4.5 bits per weight (QLoRA), nf4-double 4.13, int8 8.1; the error is printed and kept in quantisation.json.",
    )
    table_codec: Literal["raw", "nf4", "nf4-double", "int8"] = Field(
        default="raw", description="The same for the embedding table and the head."
    )


class OptimizerConfig(Section):
    """How a parameter steps: AdamW, its arithmetic in fp32 in any case, and what of it is kept at home."""

    lr: float = Field(default=2e-5, ge=0, description="Learning rate after warm-up.")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.999), strict=False, description="Decay per step of the first and the second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        default=0.01, ge=0, description="Decoupled weight decay, x lr; biases and norms take none."
    )
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Global 2-norm to which gradients are clipped; 0 turns clipping off."
    )
    clip: Literal["global", "unit", "none"] = Field(
        default="global",
        description="Which 2-norm is clipped to max_grad_norm. global: that of all gradients, which wait at home for "
        "it; unit: that of each unit (embedding, block, head) by itself; none: nothing is clipped. Without the global "
        "norm a unit steps as soon as its backward has run, and gradients take no memory at home.",
    )
    gradients: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="In what gradients wait for the global norm. bf16 rounds them once they are summed: 2 bytes per "
        "parameter instead of 4, not bit-exact.",
    )
    state: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="In what the two moments are kept: 8, 4 or 2.03 bytes per parameter. bf16 is rounded by chance, "
        "int8 in blocks of 64; neither is bit-exact.",
    )
    masters: Literal["auto", "separate", "split"] = Field(
        default="auto",
        description="How fp32 masters lie beside bf16 weights. separate: a plane of their own, 6 bytes with the "
        "weight; split: the bits that the weight lacks, 4.13 bytes, bit-exact beside fp32 moments; auto: split where "
        "state is not fp32.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine",
        description="Learning rate after warm-up; linear and cosine reach zero at the last step.",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps over which the learning rate rises from zero."
    )
    warmup_ratio: Fraction = Field(
        default=0.0, description="The same as a fraction of train.steps; give one of the two."
    )


class MemoryConfig(Section):
    """Which device computes, how much memory each tier may use, and where the training state lives.

    Budgets are promises: a run that cannot keep them says so before it starts. Sizes are numbers of bytes, or
    texts such as 64MiB, 20GiB, 24GB.
    """

    device: Device = Field(
        default="auto",
        description="cpu, cuda, cuda:N (device number N), cuda:0,1 or cuda:all (a worker on each of them), emulated:N "
        "(N workers on the CPU with capped memory and link), or auto: cuda where there is one, otherwise cpu.",
    )
    device_memory: Size | None = Field(
        default=None,
        description="Budget on the device, of each where there are several, a size; null is what is free, less a "
        "margin.",
    )
    host_memory: Size | None = Field(
        default=None, description="Budget in host memory, a size; null is what is free, less a margin."
    )
    disk_memory: Size | None = Field(
        default=None, description="Budget on disk, a size; null is what is free, less a margin."
    )
    home: Literal["auto", "host", "disk"] = Field(
        default="auto",
        description="Where weights and optimizer state rest between uses; "
        "auto is host if they fit its budget.",
    )
    store_dir: PathText | None = Field(
        default=None, description="Directory of the disk home, best on a local NVMe; null is run_dir/store."
    )
    commits: Literal["step", "none"] = Field(
        default="step",
        description="step: a home on disk keeps what a step changes twice, so that a run goes on from the last "
        "step whatever ended it; none: it takes half the disk, and a run goes on from the last checkpoint.",
    )
    slots: int | None = Field(
        default=None, ge=1, description="Units that the device holds at once; null lets the planner choose."
    )
    prefetch: int | None = Field(
        default=None,
        ge=0,
        description="Units loaded ahead of the one that computes; null lets the planner choose.",
    )
    offload: bool | None = Field(
        default=None,
        description="Whether activations leave the device between passes; null: if they do not fit.",
    )
    activations: Literal[
        "auto",
        "recompute",
        "keep-attention",
        "keep-products",
        "keep",
        "offload-attention",
        "offload-products",
        "offload",
    ] = Field(
        default="auto",
        description="What becomes of what a backward needs of its forward. recompute: it is made again; keep: it "
        "stays on the device, keep-attention: what attention returned, keep-products: what matrix products returned as "
        "well, and the rest is made again; offload and offload-...: the same, but it waits below the device; auto: it "
        "stays as far as there is room when all else has, and on CUDA waits below the device where that is predicted "
        "to shorten a step.",
    )
    tile_elements: int | None = Field(
        default=None,
        ge=2048,
        multiple_of=2048,
        description="Elements per tile of the optimizer step on disk, a multiple of 2048; "
        "null lets the planner choose.",
    )
    link_gb_per_s: float | None = Field(
        default=None,
        gt=0,
        description="Speed of the link of emulated devices, GB/s per direction (1 GB = 1e9 bytes); null: no "
        "throttle.",
    )


class TransportConfig(Section):
    """How bytes are written on the link between a device and host memory.

    lossless4 and lossless3 keep every bit; all others lose, within a bound that docs/codecs.md states.
    """

    weights: Literal["raw", "auto", "lossless4", "lossless3"] = Field(
        default="raw",
        description="Weights on their way up, encoded once at home (those that train, after each of their steps) and "
        "decoded on the device. auto: encoded if that is predicted to shorten a step, which it does where the link is "
        "what a step waits for.",
    )
    activations: Literal[
        "raw",
        "lossless4",
        "lossless3",
        "int8",
        "int8-asymmetric",
        "int8-hadamard",
        "int4",
        "int4-asymmetric",
        "int4-hadamard",
    ] = Field(default="raw", description="Inputs of units that leave the device between passes.")
    gradients: Literal[
        "raw",
        "lossless4",
        "lossless3",
        "int8",
        "int8-stochastic",
        "int8-ef",
        "int8-hadamard",
        "int8-hadamard-stochastic",
        "int8-hadamard-ef",
        "int4",
        "int4-stochastic",
        "int4-ef",
        "int4-hadamard",
        "int4-hadamard-stochastic",
        "int4-hadamard-ef",
    ] = Field(
        default="raw",
        description="Gradients on their way home. -ef adds what was lost to the next step's, and keeps it on the "
        "device, 2 bytes for each parameter that trains.",
    )


class ParallelConfig(Section):
    """How several processes train one model together, where torchrun or its like starts them; see docs/nodes.md.

    train.tokens_per_step is what all of them train together; train.microbatches are those of each.
    """

    mode: Literal["auto", "stream", "ddp"] = Field(
        default="auto",
        description="stream: every rank streams the model from a home of its own, which holds all weights and a share "
        "of the optimizer's state; ddp: every rank holds the whole training state on its device, and torch's "
        "DistributedDataParallel averages gradients; auto is stream.",
    )
    gradients: Literal["fp32", "bf16", "int8", "int8-ef", "int8-stochastic", "int4-ef"] = Field(
        default="fp32",
        description="stream: how gradients are written between ranks; fp32 is exact, and -ef adds what was lost to the "
        "next step's, which takes 2 bytes of host memory for each parameter that trains.",
    )
    weights: Literal["raw", "delta"] = Field(
        default="raw",
        description="stream: how weights that have stepped are written between ranks, both lossless; delta sends the "
        "bits of 16-bit weights that have changed, about a tenth at fine-tuning rates.",
    )
    timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds without a heartbeat after which a rank is taken to be lost, and to wait for all to come.",
    )
    ddp_bucket_mib: float = Field(
        default=25.0, gt=0, description="MiB of gradients that are averaged with one call."
    )
    ddp_static_graph: bool = Field(
        default=False,
        description="Whether every step goes through the same parameters in the same order, so that torch looks once.",
    )
    ddp_find_unused: bool = Field(
        default=False,
        description="Whether torch looks, in every forward, for parameters that it does not use; for models that have "
        "such.",
    )
    ddp_compress: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        default="none",
        description="How gradients are written between ranks; all but none lose, and bf16 and powersgd are for GPUs.",
    )
    ddp_powersgd_rank: int = Field(
        default=4, ge=1, description="Rank of the factors that PowerSGD sends in place of a matrix."
    )


class TelemetryConfig(Section):
    """Who is told what a run does, besides its own directory."""

    writers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        strict=False,
        description="Trackers that are told of steps too, e.g. `[tensorboard]`; each is an extra of the same name. "
        "One that fails is left out, and the run goes on.",
    )
    project: str = Field(
        default="outsize", min_length=1, description="Project that wandb and trackio keep the run in."
    )
    every: int = Field(default=1, ge=1, description="Steps between two that trackers are told of.")


class Config(Section):
    """One training run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    transport: TransportConfig = TransportConfig()
    parallel: ParallelConfig = ParallelConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        contradictions = rules.contradictions(self)
        if contradictions:
            raise ValueError("\n".join(contradictions))
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, padding included."""
        return self.train.tokens_per_step or self.data.seq_len * self.microbatches

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; one where nobody has chosen yet."""
        return self.train.microbatches or 1

    def in_microbatches(self, count: int) -> Self:
        """Return the same run with steps cut into ``count`` microbatches, at most one for each sequence."""
        train = self.train.model_copy(update={"microbatches": count})
        return self.model_copy(update={"train": train})

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step, over all microbatches."""
        return self.tokens_per_step // self.data.seq_len

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, from whichever of the two keys was given."""
        return self.optimizer.warmup_steps or round(self.optimizer.warmup_ratio * self.train.steps)

    def notes(self) -> list[str]:
        """Return one sentence for every setting that has no effect on this run."""
        return rules.settings_without_effect(self)
