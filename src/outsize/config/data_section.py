"""Section data: what it is trained on."""

from typing import Literal

from pydantic import Field

from outsize.config.section import PathText, Section


class DataConfig(Section):
    """What it is trained on, and how text becomes sequences."""

    path: PathText = Field(description="A file, or a directory that is read recursively in sorted order.")
    format: Literal["auto", "text", "messages", "sharegpt", "prompt_completion", "alpaca", "tokens"] = Field(
        default="auto",
        description="Layout of the records, whatever files they are in; auto looks at them and prints what it took "
        "them for.",
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
