"""Section model: which model is trained."""

from typing import Annotated, Literal

from pydantic import Field

from outsize.choices import BlockKernels, CompileOrAuto, Dtype, Products
from outsize.config.section import PathText, Section
from outsize.config.without_effect import OF_A_RANK, TOLD_ON_RESUME


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
    compile: Annotated[CompileOrAuto, TOLD_ON_RESUME] = Field(
        default="off",
        description="Whether torch.compile compiles each kind of block, forward and backward: before the first step, "
        "and kept for later runs. A kind that it cannot take whole runs as it is, which is told. "
        "auto compiles them, times steps both ways, and keeps the faster.",
    )
    kernels: BlockKernels = Field(
        default="none",
        description="What computes norms, rotations and gated activations: transformers' operations, a kernel of "
        "Liger's each (extra liger; on accelerators), or those of the Hugging Face hub that transformers names for "
        "layers (extra hub). Models for which there are none are refused.",
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
