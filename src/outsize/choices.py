"""The words between which a user chooses, where flags, configuration, calls and planner know the same ones.

They stand apart so that ``--help`` can list them without loading the configuration, and the planner can take them.
"""

from collections.abc import Mapping
from typing import Literal

Method = Literal["full", "lora"]
# What a model is to learn, each but sft a row of `outsize.objectives.recipes.RECIPES`; and which of them have a key of
# section train of their own.
Objective = Literal["sft", "dpo", "orpo", "kto", "reward", "classify", "embed", "distill"]
OBJECTIVES_OF: Mapping[str, tuple[Objective, ...]] = {
    "beta": ("dpo", "orpo", "kto", "distill"),
    "temperature": ("embed", "distill"),
    "teacher": ("distill",),
    "no dropout": ("dpo", "orpo", "kto", "reward"),
}
# Whose records are conversations and texts; others have fields of their own.
OF_TEXTS: tuple[Objective, ...] = ("sft", "distill")
Home = Literal["auto", "host", "disk"]
ComputeDtype = Literal["fp32", "bf16", "fp16"]
Dtype = Literal["auto", ComputeDtype]
# Layouts of records, each a row of `outsize.data.reading.formats.FORMATS`.
DataFormat = Literal["text", "messages", "sharegpt", "prompt_completion", "alpaca", "tokens"]
# What of a conversation is trained.
TrainOn = Literal["replies", "last", "all"]
# How documents become sequences.
Packing = Literal["stream", "documents", "none"]
# How the learning rate goes on behind the warm-up, and of which schedules it ends at min_lr.
Schedule = Literal["constant", "linear", "cosine", "cosine_restarts", "wsd", "inverse_sqrt"]
WITH_MIN_LR = ("cosine", "wsd")
Clip = Literal["global", "unit", "none"]
Moments = Literal["fp32", "bf16", "int8"]
Masters = Literal["separate", "split", "split24"]
MastersOrAuto = Literal["auto", Masters]
# How Muon's rate follows from the shape of a matrix.
AdjustRate = Literal["original", "match_rms_adamw"]
# Where its matrices are multiplied.
NewtonSchulz = Literal["auto", "host", "device"]
# How stages hand over what they make for the next one.
Handover = Literal["auto", "host", "peer"]
# What of a model torch compiles.
Compile = Literal["off", "blocks"]
# What is computed of texts that are scored.
Scored = Literal["logprobs", "logits", "hidden", "embeddings"]
# How many units rest on the device with all their state.
Resident = Literal["auto"] | int
# What linear layers of blocks multiply in: the model's dtype, or 8 bits, with a scale for each matrix or each row.
Products = Literal["native", "fp8", "fp8-rowwise"]
# Whose kernels norms, rotations and activations of a model are.
BlockKernels = Literal["none", "liger"]
# What becomes of what backwards need of their forwards.
Activations = Literal[
    "auto",
    "recompute",
    "keep-attention",
    "keep-products",
    "keep",
    "offload-attention",
    "offload-products",
    "offload",
]
