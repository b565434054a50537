"""Sections train, lora and telemetry: how long, which adapters, and who is told."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from outsize.choices import OBJECTIVES_OF, Method, Objective
from outsize.codecs.codec_spec import FrozenCodec
from outsize.config.section import (
    NO_STALL,
    NO_WRITERS,
    OF_A_RANK,
    TOLD_ON_RESUME,
    TRAINERS,
    Case,
    Fraction,
    Idle,
    Modules,
    PathText,
    Positive,
    Section,
)


class TrainConfig(Section):
    """How long it is trained, in which portions, and where the run is kept."""

    method: Method = Field(
        default="full",
        description="full: all parameters that model.freeze does not name; lora: adapters beside a frozen model, see "
        "section lora.",
    )
    objective: Objective = Field(
        default="sft",
        description="What is learnt. sft: the tokens that follow; dpo, orpo: to prefer the chosen of two answers; kto: "
        "to prefer answers marked good; reward: to score answers; classify: the class of a text; embed: vectors of "
        "texts that belong together; distill: what train.teacher predicts. All but sft go by trainers of TRL or "
        "transformers, see docs/objectives.md.",
    )
    beta: Annotated[
        float | None,
        Idle(("train.objective has no such weight", lambda case: not case.learns(*OBJECTIVES_OF["beta"]))),
        TOLD_ON_RESUME,
    ] = Field(
        default=None,
        ge=0,
        description="dpo, kto: how strongly the model is held to what it was; orpo: weight of the preference; distill: "
        "share of the teacher in the loss. null is 0.1, of distill 0.5.",
    )
    temperature: Annotated[
        float | None,
        Idle(
            (
                "train.objective has no temperature",
                lambda case: not case.learns(*OBJECTIVES_OF["temperature"]),
            )
        ),
        TOLD_ON_RESUME,
    ] = Field(
        default=None,
        gt=0,
        description="embed: what similarities are divided by; distill: what the logits of both models are. null is "
        "0.05, of distill 1.",
    )
    teacher: Annotated[
        PathText | None,
        Idle(("train.objective has no teacher", lambda case: not case.learns(*OBJECTIVES_OF["teacher"]))),
        TOLD_ON_RESUME,
    ] = Field(
        default=None,
        description="distill: directory or hub id of the model that is learnt from, or the directory of its logits "
        "that outsize score wrote.",
    )
    steps: Annotated[
        int,
        Idle(("train.epochs says how long", lambda case: case.config.train.epochs is not None)),
        TOLD_ON_RESUME,
    ] = Field(default=100, ge=1, description="Optimizer steps in all, those before a resume included.")
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="How often the data are used, in place of train.steps: rounded up to whole steps once the data are "
        "read. Where neither is given, conversations, prompts and preferences are used once.",
    )
    tokens_per_step: int | None = Field(
        default=None,
        ge=2,
        description="Tokens per optimizer step, a multiple of data.seq_len; "
        "null is data.seq_len x microbatches, or one sequence; of conversations and prompts what fits them.",
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Sequences per optimizer step, over all microbatches, in place of train.tokens_per_step.",
    )
    microbatches: Annotated[int | None, TOLD_ON_RESUME] = Field(
        default=None,
        ge=1,
        description="Slices of a step that pass through a unit one after the other; "
        "more of them need less memory for activations and move no more weights. null is as few as fit, or with "
        "several workers as many as shorten a step by a percent; the number chosen is in run_dir/config.yaml.",
    )
    round_microbatches: Annotated[
        int | None,
        Idle(
            (
                "a step has no more microbatches",
                lambda case: (
                    (case.config.train.round_microbatches or 0) > (case.config.train.microbatches or 2**63)
                ),
            ),
            *TRAINERS,
        ),
    ] = Field(
        default=None,
        ge=1,
        description="Microbatches that pass through all units, forward and backward, before the next ones begin: a "
        "step is one or more such rounds, and activations take the memory of one. Small rounds keep more and recompute "
        "less, large ones load weights and bring up sums of gradients less often. null is what is fastest in the "
        "memory there is; the number chosen is in run_dir/config.yaml where a step has several rounds.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of data order, dropout and fresh weights; a whole number.",
    )
    run_dir: Annotated[PathText | None, OF_A_RANK] = Field(
        default=None, description="Directory of this run; null is runs/<date and time of the start>."
    )
    loss: Annotated[Literal["auto", "model", "chunked"], Idle(*TRAINERS)] = Field(
        default="auto",
        description="model: the loss that the model returns; chunked: head and cross-entropy on "
        "head_chunk_tokens tokens at a time, which never holds all logits; "
        "auto: chunked where the head allows it.",
    )
    loss_function: Annotated[str | None, TOLD_ON_RESUME] = Field(
        default=None,
        min_length=1,
        description="A loss of your own in place of the model's: `FILE.py:FUNCTION` or `MODULE:FUNCTION`, called with "
        "the logits and labels of a microbatch, and returning the mean over its targets. It sees all logits of a "
        "microbatch at once. null is the model's.",
    )
    program: Annotated[str | None, Idle(*TRAINERS), TOLD_ON_RESUME] = Field(
        default=None,
        min_length=1,
        description="A program of your own for each step, see programs.md: a file of ops, the plan.json of a run, or "
        "`FILE.py:FUNCTION`, which is called with the text of the plan's own and returns another over the same memory. "
        "The bits are the same, or it is refused. null is the plan's.",
    )
    head_chunk_tokens: Annotated[
        int,
        Idle(
            ("train.loss is model", lambda case: case.config.train.loss == "model"),
            ("train.loss_function is given", lambda case: case.config.train.loss_function is not None),
            ("the loss of this model is its own", lambda case: case.around.chunks_loss is False),
            *TRAINERS,
        ),
    ] = Field(default=512, ge=1, description="Tokens per chunk of the chunked loss.")
    mlp_parts: int = Field(
        default=1,
        ge=1,
        description="Parts in which the MLP of a block, or its router and experts, takes the tokens of a microbatch, "
        "one after the other: long sequences need less memory, and nothing takes longer where parts have thousands of "
        "tokens. Sums over parts round differently, as those over microbatches do.",
    )
    neftune_noise_alpha: Annotated[float | None, TOLD_ON_RESUME] = Field(
        default=None,
        gt=0,
        description="NEFTune: noise that training adds to the embeddings of each sequence, uniform within alpha / "
        "sqrt(tokens x hidden size); 5 to 15 are usual for fine-tuning on chats. null adds none.",
    )
    save_every: Annotated[
        int,
        Idle(
            (
                "the run ends before, and saves at its end",
                lambda case: case.config.train.save_every >= case.config.train.steps,
            )
        ),
    ] = Field(
        default=0,
        ge=0,
        description="Steps between checkpoints in Hugging Face layout, written beside training; 0 does not count "
        "steps. One is written at the end in any case.",
    )
    save_minutes: float | None = Field(
        default=None,
        ge=0,
        description="Minutes between checkpoints, besides those of save_every; 0 does not look at the clock. "
        "null is 30 where the state is in host memory, memory.commits is none or a trainer of TRL trains, the first "
        "after 5, and 0 where its home commits every step.",
    )
    save_total_limit: Annotated[
        int | None,
        Idle(("only the end is saved", Case.saves_once)),
    ] = Field(
        default=2,
        ge=1,
        description="Checkpoints of this run to keep; older ones are removed once a new one is safe on the disk. "
        "null keeps all.",
    )
    resume: Annotated[
        PathText,
        Idle(
            (
                "without train.run_dir every run is a new one",
                lambda case: case.config.train.resume == "auto" and case.config.train.run_dir is None,
            )
        ),
        OF_A_RANK,
    ] = Field(
        default="none",
        description="none starts a new run; auto continues from the last committed step or the newest checkpoint in "
        "run_dir, or starts afresh if there is none; a path continues, in a new run_dir, from that checkpoint, or from "
        "the newest one of that run; checkpoints of the Hugging Face Trainer are taken too.",
    )
    profile_steps: Annotated[
        int,
        Idle(("the first two steps are not recorded", lambda case: case.config.train.steps <= 2), *TRAINERS),
    ] = Field(
        default=0,
        ge=0,
        description="Steps, from the third of the process on, that torch.profiler records into run_dir/profile.json.",
    )
    on_nonfinite: Literal["raise", "skip"] = Field(
        default="raise",
        description="What a NaN or infinite loss or gradient does, before any weight of the step is saved: "
        "end the run, or skip the step, changing nothing, and count it.",
    )
    on_stall: Annotated[Literal["abort", "report", "ignore"], Idle(*TRAINERS)] = Field(
        default="abort",
        description="What becomes of a step in which nothing ends any more: report where it stands and end the run, "
        "report it and wait on, or nothing.",
    )
    stall_factor: Annotated[float, Idle(*NO_STALL, *TRAINERS)] = Field(
        default=10.0,
        ge=1,
        description="A step is stalled if none of its ops ends for this many times the median of the steps before, or "
        "the predicted step until one was measured.",
    )
    stall_floor_s: Annotated[float, Idle(*NO_STALL, *TRAINERS)] = Field(
        default=600.0,
        gt=0,
        description="The least time, in seconds, after which a step is taken to be stalled.",
    )
    deterministic: bool = Field(
        default=True, description="Whether only kernels are used that give the same bits in every run."
    )


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
    lora_dropout: Annotated[
        Fraction,
        Idle(
            (
                "trainers of preferences turn all dropout off",
                lambda case: case.learns(*OBJECTIVES_OF["no dropout"]),
            )
        ),
    ] = Field(default=0.0, description="Dropout on the inputs of adapters.")
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


class TelemetryConfig(Section):
    """Who is told what a run does, besides its own directory."""

    writers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        strict=False,
        description="Trackers that are told of steps too, e.g. `[tensorboard]`; each is an extra of the same name. "
        "One that fails is left out, and the run goes on.",
    )
    project: Annotated[
        str,
        Idle(
            *NO_WRITERS,
            (
                "neither wandb nor trackio is among telemetry.writers",
                lambda case: not {"wandb", "trackio"} & set(case.config.telemetry.writers),
            ),
        ),
    ] = Field(default="outsize", min_length=1, description="Project that wandb and trackio keep the run in.")
    every: Annotated[int, Idle(*NO_WRITERS)] = Field(
        default=1, ge=1, description="Steps between two that trackers are told of."
    )
