"""The words between which a user chooses, where flags, configuration, calls and planner know the same ones.

They stand apart so that ``--help`` can list them without loading the configuration, and the planner can take them.
"""

from typing import Literal

Method = Literal["full", "lora"]
# What a model is to learn.
Objective = Literal["sft", "dpo", "orpo", "kto", "reward", "classify", "embed", "distill"]
Home = Literal["auto", "host", "disk"]
ComputeDtype = Literal["fp32", "bf16", "fp16"]
Dtype = Literal["auto", ComputeDtype]
# How documents become sequences.
Packing = Literal["stream", "documents", "none"]
Clip = Literal["global", "unit", "none"]
Moments = Literal["fp32", "bf16", "int8"]
Masters = Literal["auto", "separate", "split", "split24"]
# Where Muon's matrices are multiplied.
NewtonSchulz = Literal["auto", "host", "device"]
WireGradients = Literal["fp32", "bf16", "int8", "int8-ef", "int8-stochastic", "int4-ef"]
WireWeights = Literal["raw", "delta"]
# How frozen weights rest and go over links.
FrozenCodec = Literal["raw", "nf4", "nf4-double", "int8", "fp8"]
# How weights go over links; all keep every bit, and what else there is.
EXACT_WEIGHTS = (
    "weights that train keep every bit, and frozen ones rest and cross in fewer by base_codec (section lora)"
)
TransportWeights = Literal["raw", "auto", "lossless4", "lossless3"]
TransportActivations = Literal[
    TransportWeights, "int8", "int8-asymmetric", "int8-hadamard", "int4", "int4-asymmetric", "int4-hadamard"
]
_Int8Gradients = Literal[
    "int8", "int8-stochastic", "int8-ef", "int8-hadamard", "int8-hadamard-stochastic", "int8-hadamard-ef"
]
_Int4Gradients = Literal[
    "int4", "int4-stochastic", "int4-ef", "int4-hadamard", "int4-hadamard-stochastic", "int4-hadamard-ef"
]
TransportGradients = Literal[TransportWeights, _Int8Gradients, _Int4Gradients]
# How stages hand over what they make for the next one.
Handover = Literal["auto", "host", "peer"]
# What of a model torch compiles; a run can time both.
Compile = Literal["off", "blocks"]
CompileOrAuto = Literal["auto", Compile]
# What linear layers of blocks multiply in: the model's dtype, or 8 bits, with a scale for each matrix or each row.
Products = Literal["native", "fp8", "fp8-rowwise"]
# Whose kernels norms, rotations and activations of a model are.
BlockKernels = Literal["none", "liger", "hub"]
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
