"""Sections model and optimizer: what is trained, and how a parameter steps."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from outsize.choices import (
    AdjustRate,
    BlockKernels,
    Clip,
    Compile,
    Dtype,
    MastersOrAuto,
    Moments,
    NewtonSchulz,
    Products,
    Schedule,
)
from outsize.config.section import (
    OF_A_RANK,
    TOLD_ON_RESUME,
    TRAINERS,
    Case,
    Fraction,
    Idle,
    PathText,
    Section,
)
from outsize.optim.optimizer_names import ADAMW, with_defaults


class ModelConfig(Section):
    """Model to train, its precision, and its trainable parameters."""

    path: Annotated[PathText, OF_A_RANK] = Field(
        description="Directory in Hugging Face layout (config.json, safetensors, tokenizer), or a hub id."
    )
    dtype: Dtype = Field(
        default="auto",
        description="Compute dtype; master weights are exact fp32 in any case. "
        "auto is fp32 on cpu and emulated devices, bf16 on accelerators, and fp16 with its losses scaled on GPUs "
        "that do not multiply bf16 (compute capability below 8.0).",
    )
    attention: Annotated[
        Literal["auto", "sdpa", "eager", "flash_attention_2"],
        TOLD_ON_RESUME,
    ] = Field(
        default="auto",
        description="Attention kernel; auto takes what the model offers, and the choice is logged.",
    )
    compile: Annotated[Compile, TOLD_ON_RESUME] = Field(
        default="off",
        description="Whether torch.compile compiles each kind of block, forward and backward: before the first step, "
        "and kept for later runs. A kind that it cannot take whole runs as it is, which is told.",
    )
    kernels: BlockKernels = Field(
        default="none",
        description="What computes norms, rotations and gated activations: transformers' operations, or a kernel "
        "of Liger's each (extra liger; on accelerators). Models for which there are none are refused.",
    )
    products: Products = Field(
        default="native",
        description="What linear layers of blocks multiply in: the dtype of the model, or 8 bits (extra fp8), by "
        "torchao's float8 training: fp8 with a scale for each matrix, fp8-rowwise for each row. GPUs from Ada on, and "
        "AMD's from MI300; emulated on a CPU, which is slow.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether Python code that comes with the model directory may run."
    )
    freeze: Annotated[tuple[str, ...], TOLD_ON_RESUME] = Field(
        default=(),
        strict=False,
        description='Patterns of parameter names that are not trained, e.g. `["*embed_tokens*"]`; '
        "`*` matches any run of characters.",
    )


class GroupConfig(Section):
    """Parameters with rates of their own."""

    params: tuple[str, ...] = Field(
        strict=False,
        min_length=1,
        description='Patterns of their names, e.g. `["*embed_tokens*"]`; `*` matches any run of characters.',
    )
    lr: float = Field(default=1.0, ge=0, description="Factor of optimizer.lr.")
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="Factor of optimizer.weight_decay; null is 0 for biases and norms, else 1.",
    )
    muon: bool = Field(
        default=True, description="muon: whether it may step them, where they are matrices of blocks."
    )


class OptimizerConfig(Section):
    """How a parameter steps, its arithmetic in fp32 in any case, and what of it is kept at home."""

    name: str = Field(
        default=ADAMW,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$",
        description="adamw: two moments, as torch.optim.AdamW; muon: a momentum of matrices of blocks, made "
        "orthogonal, as torch.optim.Muon, and adamw for everything else; any other class of torch.optim by its name "
        "(SGD, Adafactor, RMSprop, …), or package.module.Class, whose own code then steps on host cores, bit for bit, "
        "its state in fp32. SGD has a momentum of 0.9 by default.",
    )
    args: dict[str, Any] = Field(
        default={},
        description="Arguments of a class, e.g. `{momentum: 0.9, nesterov: true}` of SGD, besides lr and weight_decay.",
    )
    lr: float = Field(
        default=2e-5,
        ge=0,
        description="Learning rate after warm-up; where it is not given, 2e-4 for adapters. Adafactor: relative to the "
        "root mean square of a parameter, and at most one over the root of the step; 0.01 by default.",
    )
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.999),
        strict=False,
        description="adamw, and beside muon: decay per step of the first and the second moment.",
    )
    eps: float = Field(
        default=1e-8, gt=0, description="adamw, and beside muon: added to the root of the second moment."
    )
    momentum: Fraction = Field(default=0.95, description="muon: share of the former direction that is kept.")
    nesterov: bool = Field(default=True, description="muon: step along the gradient and the new momentum.")
    ns_steps: int = Field(
        default=5, ge=1, lt=100, description="muon: iterations that make a momentum orthogonal."
    )
    ns_on: NewtonSchulz = Field(
        default="auto",
        description="muon: where these iterations multiply. host: on its cores; device: a matrix at a time goes up the "
        "link in bf16 and comes back so; auto: on a GPU where that is predicted to make a step 3 % shorter and has "
        "room, else on the host. A run that goes on keeps the choice.",
    )
    adjust_lr_fn: AdjustRate = Field(
        default="match_rms_adamw",
        description="muon: how the learning rate of a matrix follows from its shape. match_rms_adamw gives its steps "
        "the size of AdamW's, so that one lr serves both; original, torch's default, the spectral norm lr, which wants "
        "an lr ten to a hundred times AdamW's, and a factor in groups for what AdamW steps.",
    )
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        description="Weight decay as the optimizer has it: decoupled, x lr, of adamw and muon. By default 0.1 for "
        "muon, and 0 for classes of torch; biases and norms take none.",
    )
    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Factor of the learning rate from the head to the last block, from each block to the one below it, "
        "and from the first block to the embedding; 0.8 to 0.95 are usual where little is to be unlearnt.",
    )
    groups: tuple[GroupConfig, ...] = Field(
        default=(),
        strict=False,
        description="Parameters with rates of their own, each entry with `params`, a list of patterns of their names, "
        "and factors `lr` and `weight_decay`; the first entry that fits counts.",
    )
    max_grad_norm: Annotated[
        float,
        Idle(("optimizer.clip is none", lambda case: case.config.optimizer.clip == "none")),
    ] = Field(
        default=1.0, ge=0, description="Global 2-norm to which gradients are clipped; 0 turns clipping off."
    )
    clip: Annotated[
        Clip,
        Idle(("optimizer.max_grad_norm is 0", lambda case: not case.config.optimizer.max_grad_norm)),
    ] = Field(
        default="global",
        description="Which 2-norm is clipped to max_grad_norm. global: that of all gradients, which wait at home for "
        "it; unit: that of each unit (embedding, block, head) by itself; none: nothing is clipped. Without the global "
        "norm a unit steps as soon as its backward has run, and gradients take no memory at home.",
    )
    gradients: Annotated[
        Literal["fp32", "bf16"],
        Idle(("gradients do not wait for a global norm", lambda case: not case.gradients_wait())),
    ] = Field(
        default="fp32",
        description="In what gradients wait for the global norm. bf16 rounds them once they are summed: 2 bytes per "
        "parameter instead of 4, not bit-exact.",
    )
    state: Moments = Field(
        default="fp32",
        description="In what the two moments of adamw and muon are kept: 8, 4 or 2.03 bytes per parameter. bf16 is "
        "rounded by chance, int8 in blocks of 64; neither is bit-exact.",
    )
    masters: Annotated[
        MastersOrAuto,
        Idle(
            ("only beside bf16 weights is there a choice", lambda case: case.dtype in ("fp32", "fp16")),
            *TRAINERS,
        ),
    ] = Field(
        default="auto",
        description="How fp32 masters lie beside bf16 weights. separate: a plane of their own, 6 bytes with the "
        "weight; split: the bits that the weight lacks, 4.13 bytes, bit-exact beside fp32 moments; split24: the "
        "upper 8 of these bits, rounded by chance, 3 bytes, not bit-exact; auto: split where state is not fp32, and in "
        "a single process where C kernels step them, unless units on the device step sooner with separate ones; as it "
        "lies in a home that a run goes on from.",
    )
    schedule: Schedule = Field(
        default="cosine",
        description="Learning rate after warm-up, as transformers has it. linear reaches zero at the last step, cosine "
        "min_lr; cosine_restarts reaches zero restarts + 1 times; wsd stays, and falls to min_lr in the last "
        "decay_ratio of the steps; inverse_sqrt falls with the root of the step.",
    )
    min_lr: Annotated[
        float,
        Idle(("optimizer.schedule is neither cosine nor wsd", Case.has_no_min_lr)),
    ] = Field(default=0.0, ge=0, description="cosine, wsd: learning rate at the last step, at most lr.")
    decay_ratio: Annotated[
        Fraction,
        Idle(("optimizer.schedule is not wsd", lambda case: case.schedule != "wsd")),
    ] = Field(default=0.1, description="wsd: share of the steps in which it falls.")
    restarts: Annotated[
        int,
        Idle(("optimizer.schedule is not cosine_restarts", lambda case: case.schedule != "cosine_restarts")),
    ] = Field(default=1, ge=0, description="cosine_restarts: how often the rate begins again from lr.")
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps over which the learning rate rises from zero."
    )
    warmup_ratio: Fraction = Field(
        default=0.0, description="The same as a fraction of train.steps, rounded up; give one of the two."
    )

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        """Fill in what the named optimizer has by default."""
        return with_defaults(given) if isinstance(given, Mapping) else given
