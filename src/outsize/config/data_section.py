"""Sections data and eval: what is trained on, and what a model is measured on."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from outsize.choices import DataFormat, Packing, TrainOn
from outsize.config.section import (
    FIELDS,
    MASKS,
    NO_EVALUATION,
    NO_RECORDS,
    OF_A_RANK,
    TOLD_ON_RESUME,
    TRAINERS,
    Fraction,
    Idle,
    PathText,
    Section,
)


def packing_of(value: Any) -> Any:
    """Return the word for what was ``true`` or ``false`` before there were three ways to lay documents out."""
    return {"true": "stream", "false": "none"}.get(str(value).lower(), value)


class SourceConfig(Section):
    """One source of the data, and how its records are read."""

    path: Annotated[PathText, OF_A_RANK] = Field(
        description="A file; a directory, read recursively in sorted order, or as the datasets library has saved it; "
        "or `hf://datasets/OWNER/NAME#SPLIT`, streamed from the hub."
    )
    format: Annotated[Literal["auto", DataFormat], Idle(*FIELDS)] = Field(
        default="auto",
        description="Layout of the records, whatever files they are in; auto looks at them and prints what it took "
        "them for.",
    )
    text_field: Annotated[
        str,
        Idle(
            (
                "records of data.format have no such field",
                lambda case: case.config.data.format not in ("auto", "text"),
            ),
            *NO_RECORDS,
            *FIELDS,
        ),
    ] = Field(
        default="text", min_length=1, description="Key of the text in records of JSONL, CSV and Parquet."
    )
    columns: Annotated[dict[str, str], Idle(*NO_RECORDS)] = Field(
        default={},
        description="Fields of the records under other names: ours to theirs, e.g. `{prompt: question, completion: "
        "answer}`.",
    )
    roles: Annotated[dict[str, str], Idle(*NO_RECORDS)] = Field(
        default={},
        description="Roles of speakers that have other names in the records: theirs to a role, e.g. `{agent: "
        "assistant}`.",
    )
    train_on: Annotated[TrainOn, Idle(*NO_RECORDS, *FIELDS)] = Field(
        default="replies",
        description="What of a conversation, or of a prompt and its completion, is trained: what the assistant says, "
        "its last message alone, or every token.",
    )
    glob: Annotated[
        str | None,
        Idle(("data.path is a file", lambda case: bool(case.around.one_file))),
    ] = Field(
        default=None,
        min_length=1,
        description='Which files of a directory are read, e.g. `"*.py"`; null takes every known kind.',
    )
    max_bad_records: Annotated[int, Idle(*NO_RECORDS)] = Field(
        default=0,
        ge=0,
        description="Malformed records that are left out and counted; one more ends the run with file and line.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="How often an epoch has each sequence of the source: 2 is twice, 0.5 half of them, and the next "
        "epoch the other half.",
    )


class DataConfig(SourceConfig):
    """What it is trained on, and how text becomes sequences."""

    more: tuple[SourceConfig, ...] = Field(
        default=(),
        strict=False,
        description="Further sources, each with the keys of this section from path to weight, and their defaults.",
    )
    seq_len: int = Field(
        default=512,
        ge=2,
        description="Tokens per sequence. Where it is not given, conversations and prompts have sequences that fit "
        "them, see docs/data.md.",
    )
    pack: Annotated[Packing, BeforeValidator(packing_of), Idle(*FIELDS)] = Field(
        default="stream",
        description="How documents become sequences. stream: end to end, cut every seq_len tokens, and tokens attend "
        "across documents; documents: as many whole ones as a sequence has room for, attention stops at each border "
        "and positions begin anew; none: one document makes one sequence, padded, and what is longer is cut. Where "
        "it is not given, conversations and prompts are documents, or none where the model sees across borders.",
    )
    group_by_length: Annotated[
        bool,
        Idle(("data.pack is not none", lambda case: case.config.data.pack != "none"), *TRAINERS),
    ] = Field(
        default=False,
        description="With pack none: documents of like length come into one step, whose sequences all end with the "
        "longest of them instead of at seq_len.",
    )
    mlm_probability: Annotated[float, Idle(*MASKS), TOLD_ON_RESUME] = Field(
        default=0.15,
        gt=0,
        le=1,
        description="Masked language models: share of the tokens that are to be predicted, drawn anew each time that a "
        "sequence is trained on.",
    )
    mask_replace_prob: Annotated[float, Idle(*MASKS), TOLD_ON_RESUME] = Field(
        default=0.8,
        ge=0,
        le=1,
        description="Share of those that become the mask token in what the model sees.",
    )
    random_replace_prob: Annotated[float, Idle(*MASKS), TOLD_ON_RESUME] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of those that become any token; the rest stay as they are.",
    )
    window: int | None = Field(
        default=None,
        ge=1,
        description="Sequences within which the order is drawn; null draws it over all data, which are tokenised "
        "before the run begins. With a number, sequences come in the order of the files, those of a window in any "
        "order, and the run begins when the first window is tokenised: the rest is while it trains.",
    )
    prefetch: Annotated[int, Idle(*TRAINERS)] = Field(
        default=2,
        ge=1,
        description="Batches that are ready, or in the making, ahead of the step that needs them; a token of each "
        "takes 16 bytes of host memory, 24 with padding or several documents to a sequence, which no budget counts.",
    )
    workers: Annotated[
        int,
        Idle(
            ("data.prefetch has one batch made at a time", lambda case: case.config.data.prefetch == 1),
            *TRAINERS,
        ),
    ] = Field(
        default=1,
        ge=1,
        description="Threads that make batches. One is enough for tokens on a local disk; more hide the latency of "
        "files on a network.",
    )
    template: Annotated[str | None, Idle(*NO_RECORDS)] = Field(
        default=None,
        min_length=1,
        description="Chat template: a Jinja file, the name of one of the tokenizer's, chatml or plain; null is the "
        "tokenizer's own, or plain where that has none.",
    )

    @property
    def is_grouped(self) -> bool:
        """Whether the sequences of a step are as long as its longest document."""
        return self.group_by_length and self.pack == "none"


class EvalConfig(Section):
    """What the model is measured on while it trains, by a streamed forward. One device of one process measures."""

    data: PathText | None = Field(
        default=None,
        description="A file or directory of its own, read as data.path is. null: nothing, or what split holds out.",
    )
    split: Fraction = Field(
        default=0.0,
        description="Share of the sequences of each source that is held out of training, drawn by train.seed.",
    )
    every: Annotated[int, Idle(*NO_EVALUATION)] = Field(
        default=0,
        ge=0,
        description="Steps between evaluations; 0 is the end alone, where there is one in any case.",
    )
    sequences: Annotated[int | None, Idle(*NO_EVALUATION)] = Field(
        default=None,
        ge=1,
        description="Sequences that are measured at most, the same every time; null is all.",
    )
    keep_best: Annotated[bool, Idle(*NO_EVALUATION)] = Field(
        default=True,
        description="Whether the best step so far is saved, named by checkpoints/best, and kept beside those of "
        "train.save_total_limit.",
    )
    patience: Annotated[int | None, Idle(*NO_EVALUATION)] = Field(
        default=None,
        ge=1,
        description="Evaluations in a row without a better loss after which the run ends, saved; null goes on.",
    )

    @property
    def on(self) -> bool:
        """Whether anything is measured."""
        return self.data is not None or self.split > 0
