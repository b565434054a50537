"""Section optimizer: how a parameter steps."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from outsize.choices import Clip, Masters, Moments, NewtonSchulz, Optimizer
from outsize.config.section import Fraction, Section

# What other optimizers have by default where it is not what AdamW has: those of torch, and the paper's Lion.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"weight_decay": 0.0},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
    "adafactor": {"lr": 1e-2, "weight_decay": 0.0},
    "muon": {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1},
}
# Who has a setting that not all have.
SETTINGS_OF: Mapping[str, tuple[str, ...]] = {
    "betas": ("adamw", "lion", "muon"),
    "eps": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
    "dampening": ("sgd",),
    "nesterov": ("sgd", "muon"),
    "ns_steps": ("muon",),
    "ns_on": ("muon",),
    "adjust_lr_fn": ("muon",),
    "beta2_decay": ("adafactor",),
    "eps1": ("adafactor",),
    "eps2": ("adafactor",),
    "d": ("adafactor",),
    "state": ("adamw", "sgd", "lion", "muon"),
}


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

    name: Optimizer = Field(
        default="adamw",
        description="adamw: two moments, as torch.optim.AdamW; sgd: a momentum or nothing, as torch.optim.SGD; lion: a "
        "momentum, steps of one size along its sign, which want a third to a tenth of the lr of AdamW; adafactor: "
        "second moments by row and column, as torch.optim.Adafactor, and no first ones; muon: a momentum of matrices "
        "of blocks, made orthogonal, as torch.optim.Muon, and adamw for everything else.",
    )
    lr: float = Field(
        default=2e-5,
        ge=0,
        description="Learning rate after warm-up. adafactor: relative to the root mean square of a parameter, and at "
        "most one over the root of the step; 0.01 by default.",
    )
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.999),
        strict=False,
        description="adamw, and beside muon: decay per step of the first and the second moment. lion: share of the "
        "momentum in a step, and its decay; (0.9, 0.99) by default.",
    )
    eps: float = Field(
        default=1e-8, gt=0, description="adamw, and beside muon: added to the root of the second moment."
    )
    momentum: Fraction = Field(
        default=0.9,
        description="sgd: share of the former direction that is kept; 0 keeps no state at all. muon: the same, 0.95 by "
        "default.",
    )
    dampening: float = Field(
        default=0.0, ge=0, description="sgd: share of the gradient that does not enter the momentum."
    )
    nesterov: bool = Field(
        default=False,
        description="sgd: step along the gradient and the new momentum; takes no dampening. muon: true by default.",
    )
    ns_steps: int = Field(
        default=5, ge=1, lt=100, description="muon: iterations that make a momentum orthogonal."
    )
    ns_on: NewtonSchulz = Field(
        default="auto",
        description="muon: where these iterations multiply. host: on its cores; device: a matrix at a time goes up the "
        "link in bf16 and comes back so; auto: on a GPU where that is predicted to make a step 3 % shorter and has "
        "room, else on the host. A run that goes on keeps the choice.",
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        default="match_rms_adamw",
        description="muon: how the learning rate of a matrix follows from its shape. match_rms_adamw gives its steps "
        "the size of AdamW's, so that one lr serves both; original, torch's default, the spectral norm lr, which wants "
        "an lr ten to a hundred times AdamW's, and a factor in groups for what AdamW steps.",
    )
    beta2_decay: float = Field(
        default=-0.8,
        le=0,
        description="adafactor: power of the number of the step by which a new square weighs in the second moment.",
    )
    eps1: float | None = Field(
        default=None,
        ge=0,
        description="adafactor: the first of eps, the least root of a second moment; null for that of fp32, 1.2e-7.",
    )
    eps2: float = Field(
        default=1e-3,
        ge=0,
        description="adafactor: the second of eps, what the root mean square of a parameter is taken to be at least.",
    )
    d: float = Field(
        default=1.0, ge=1, description="adafactor: root mean square to which an update is clipped."
    )
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        description="Decoupled weight decay, x lr; of sgd x the weights, added to the gradient. By default 0.1 for "
        "muon, and 0 for all others but adamw; biases and norms take none.",
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
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Global 2-norm to which gradients are clipped; 0 turns clipping off."
    )
    clip: Clip = Field(
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
    state: Moments = Field(
        default="fp32",
        description="In what the two moments are kept: 8, 4 or 2.03 bytes per parameter, and half of it where there is "
        "one. bf16 is rounded by chance, int8 in blocks of 64; neither is bit-exact.",
    )
    masters: Masters = Field(
        default="auto",
        description="How fp32 masters lie beside bf16 weights. separate: a plane of their own, 6 bytes with the "
        "weight; split: the bits that the weight lacks, 4.13 bytes, bit-exact beside fp32 moments; split24: the "
        "upper 8 of these bits, rounded by chance, 3 bytes, not bit-exact; auto: split where state is not fp32, and in "
        "a single process where C kernels step them; as it lies in a home that a run goes on from.",
    )
    schedule: Literal["constant", "linear", "cosine", "cosine_restarts", "wsd", "inverse_sqrt"] = Field(
        default="cosine",
        description="Learning rate after warm-up, as transformers has it. linear reaches zero at the last step, cosine "
        "min_lr; cosine_restarts reaches zero restarts + 1 times; wsd stays, and falls to min_lr in the last "
        "decay_ratio of the steps; inverse_sqrt falls with the root of the step.",
    )
    min_lr: float = Field(
        default=0.0, ge=0, description="cosine, wsd: learning rate at the last step, at most lr."
    )
    decay_ratio: Fraction = Field(default=0.1, description="wsd: share of the steps in which it falls.")
    restarts: int = Field(
        default=1, ge=0, description="cosine_restarts: how often the rate begins again from lr."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps over which the learning rate rises from zero."
    )
    warmup_ratio: Fraction = Field(
        default=0.0, description="The same as a fraction of train.steps; give one of the two."
    )

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        """Fill in what the named optimizer has by default."""
        if not isinstance(given, Mapping):
            return given
        name = given.get("name")
        return {**(_DEFAULTS.get(name, {}) if isinstance(name, str) else {}), **given}
