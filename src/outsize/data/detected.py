"""What was found in a data set, for people to check before a long run."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self, get_type_hints

from outsize.units import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXAMPLE_TOKENS = 2048
_RUN_CHARS = 400


@dataclass(frozen=True, kw_only=True)
class Detected:
    """A data set as it was understood.

    Attributes:
        format: ``text``, ``messages``, ``sharegpt``, ``prompt_completion``, ``alpaca`` or ``tokens``.
        forced: the format was given, not detected.
        fields: fields of the first record; empty for text files.
        mask_source: how the trained part was found, e.g. ``"all tokens"`` or ``"generation tags"``.
        num_files: files read.
        num_skipped_files: files of the directory left out.
        num_documents: documents; ``None`` where their bounds are not known.
        num_empty: records without text, left out.
        num_bad: malformed records, left out.
        bad: what was wrong with the first of them.
        notes: what of the files and records was not used: other splits, fields that nothing reads.
        num_untrained: documents of which nothing is trained.
        num_tokens: tokens, special ones included.
        num_trained_tokens: tokens that are targets.
        max_token_id: the largest token id that occurs.
        template: the chat template that conversations were written with; None for the tokenizer's own, or without any.
        example: the first document as the model sees it; ``>>...<<`` around what is trained where not all is.
    """

    format: str
    forced: bool
    fields: tuple[str, ...]
    mask_source: str
    num_files: int
    num_skipped_files: int
    num_documents: int | None
    num_empty: int
    num_bad: int = 0
    bad: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_untrained: int = 0
    num_tokens: int
    num_trained_tokens: int
    max_token_id: int
    template: str | None = None
    example: str

    @property
    def trained_share(self) -> float:
        """Share of tokens that are targets, 0 to 1."""
        return self.num_trained_tokens / self.num_tokens if self.num_tokens else 0.0

    def describe(self) -> str:
        """Return the lines that a command prints."""
        how = "given" if self.forced else "detected"
        fields = f", fields {', '.join(self.fields)}" if self.fields else ""
        documents = "" if self.num_documents is None else f"{_plural(self.num_documents, 'document')}, "
        left_out = ", ".join(
            _plural(count, noun)
            for count, noun in (
                (self.num_skipped_files, "other file"),
                (self.num_empty, "empty record"),
                (self.num_bad, "malformed record"),
            )
            if count
        )
        untrained = (
            f"  {_plural(self.num_untrained, 'document')} with nothing to train\n"
            if self.num_untrained
            else ""
        )
        notes = "".join(f"  {line}\n" for line in self.notes)
        bad = "".join(f"  left out: {line}\n" for line in self.bad)
        return (
            f"data: format {self.format} ({how}{fields}), {_plural(self.num_files, 'file')}"
            f"{f' (left out: {left_out})' if left_out else ''}\n"
            f"  {documents}{format_count(self.num_tokens)} tokens, {self.trained_share:.1%} trained "
            f"({self.mask_source})\n{untrained}{bad}{notes}"
        ).rstrip("\n")

    def shown(self) -> str:
        """Return the lines that show the first document."""
        return "\n".join(["  first document:", *(f"  | {line}" for line in self.example.splitlines())])

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the record that `to_json` wrote.

        Raises:
            ValueError: a value is not of its kind.
            TypeError, KeyError: there are others, or fewer.
        """
        lists = {name: tuple(values[name]) for name in ("fields", "bad", "notes")}
        found = cls(**{**values, **lists})
        for name, kind in get_type_hints(cls).items():
            value = getattr(found, name)
            is_right = all(isinstance(v, str) for v in value) if name in lists else isinstance(value, kind)
            if not is_right or (isinstance(value, int) and name != "max_token_id" and value < 0):
                raise ValueError(f"{name} is {value!r}")
        return found


def render_example(
    tokenizer: "PreTrainedTokenizerBase", ids: Iterable[int], trained: Iterable[bool] | None
) -> str:
    """Return tokens as text, special ones included, with ``>>...<<`` around the runs that are trained."""
    ids = list(ids)
    if trained is None:
        return _shortened(_decode(tokenizer, ids))
    runs: list[tuple[bool, list[int]]] = []
    for token, is_trained in zip(ids, trained, strict=True):
        if not runs or runs[-1][0] != bool(is_trained):
            runs.append((bool(is_trained), []))
        runs[-1][1].append(token)
    texts = [(is_trained, _shortened(_decode(tokenizer, run))) for is_trained, run in runs]
    return "".join(f">>{text}<<" if is_trained else text for is_trained, text in texts)


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _shortened(text: str) -> str:
    if len(text) <= _RUN_CHARS:
        return text
    return f"{text[: _RUN_CHARS * 3 // 4]} [...] {text[-_RUN_CHARS // 4 :]}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
