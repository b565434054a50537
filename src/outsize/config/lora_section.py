"""Section lora: the adapters of train.method=lora."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, create_model

from outsize.codecs.codec_spec import FrozenCodec
from outsize.config.section import Fraction, Modules, PathText, Positive, Section
from outsize.config.without_effect import Idle

# Keys that are not PEFT's.
OWN_KEYS = frozenset({"from", "base_codec", "table_codec"})
_FROM: Any = Field(
    default=None,
    description="Adapters that training begins with: a directory in PEFT's format, that of a run, or a hub id. All "
    "keys of PEFT are those of these adapters, which need not be said again; only lora_dropout may be another. null "
    "begins anew.",
)

if TYPE_CHECKING:
    _Begun = Section
else:  # a key that no class body can spell
    _Begun = create_model("_Begun", __base__=Section, **{"from": (PathText | None, _FROM)})


class LoraConfig(_Begun):
    """Adapters of train.method=lora: keys, meanings and defaults are those of PEFT's, but for from and the codecs.

    Adapters are fp32; the frozen model computes in model.dtype, and is held in it where no codec says otherwise.
    """

    idle: ClassVar[Idle] = Idle(("train.method is full", lambda case: case.config.train.method == "full"))

    r: int = Field(default=8, ge=1, description="Rank of the adapters.")
    lora_alpha: Positive = Field(
        default=8, description="Adapters are scaled by lora_alpha / r, or lora_alpha / sqrt(r)."
    )
    lora_dropout: Fraction = Field(default=0.0, description="Dropout on the inputs of adapters.")
    target_modules: Modules | None = Field(
        default=None,
        description="Modules that get an adapter: names or ends of names; a text is a regular expression, or "
        "all-linear for every linear layer but the head; null is PEFT's choice for the architecture.",
    )
    target_parameters: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="Parameters that get an adapter though they are no linear layer's, such as experts of a mixture: "
        "names or ends of names, e.g. experts.gate_up_proj. Each forward adds the adapter to a copy of them.",
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
    alpha_pattern: dict[str, Positive] = Field(
        default={}, description="lora_alpha of modules with another, by name."
    )
    layers_to_transform: tuple[int, ...] | None = Field(
        default=None, strict=False, description="Numbers of the layers that get adapters; null is all."
    )
    layers_pattern: Modules | None = Field(
        default=None, description="Name of the list of layers, or of several, for layers_to_transform."
    )
    fan_in_fan_out: bool = Field(
        default=False, description="Whether weights are stored (in, out), as in GPT-2; PEFT sets it there."
    )
    base_codec: FrozenCodec = Field(
        default="raw",
        description="How the frozen matrices of layers are held and streamed; they are decoded on the device. nf4 is "
        "4.5 bits per weight (QLoRA), nf4-double 4.13, int8 and fp8 8.1; the error is printed and kept in "
        "quantisation.json.",
    )
    table_codec: FrozenCodec = Field(
        default="raw", description="The same for the embedding table and the head."
    )

    @property
    def begins_with(self) -> str | None:
        """The key ``from``."""
        given: str | None = getattr(self, "from")
        return given

    def for_peft(self) -> dict[str, Any]:
        """Return the keys of PEFT with their values."""
        return self.model_dump(exclude=set(OWN_KEYS))
