"""Section optimizer: how a parameter steps."""

from typing import Literal

from pydantic import Field

from outsize.choices import Clip, Masters, Moments
from outsize.config.section import Fraction, Section


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
        description="In what the two moments are kept: 8, 4 or 2.03 bytes per parameter. bf16 is rounded by chance, "
        "int8 in blocks of 64; neither is bit-exact.",
    )
    masters: Masters = Field(
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
