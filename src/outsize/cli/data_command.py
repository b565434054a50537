"""``outsize data``: what a run would train on, before it trains."""

from functools import partial
from typing import TYPE_CHECKING, Any

from outsize.cli.text.columns import columns
from outsize.cli.text.console import Output
from outsize.cli.text.options import with_run_options

if TYPE_CHECKING:
    from outsize.config import Config

_BAR_CHARS = 40


@partial(with_run_options, has_dry_run=False)
def data(config: "Config", output: Output) -> None:
    """Show what would be trained: documents, their lengths, what is cut, and the first one as the model sees it."""
    from outsize.training import run_data

    told: list[str] = []
    found = run_data.preview(config, told.append)
    output.emit(found)
    output.print_result("\n".join([*told, "", *_lengths(found), *_sequences(found)]))


def _lengths(found: dict[str, Any]) -> list[str]:
    """Return a histogram of the documents' lengths; nothing of tokens without bounds of documents."""
    buckets = found["lengths"]
    if not buckets:
        return []
    most = max(bucket["num_documents"] for bucket in buckets)
    rows = [("tokens", "documents", "trained", "")]
    rows += [
        (
            f"<= {bucket['most_tokens']:,}",
            f"{bucket['num_documents']:,}",
            f"{bucket['num_trained']:,}",
            "#" * max(1, round(_BAR_CHARS * bucket["num_documents"] / most)),
        )
        for bucket in buckets
    ]
    return [*columns(rows), ""]


def _sequences(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['num_sequences']:,} sequences of {found['seq_len']} tokens per epoch, "
        f"{found['steps_per_epoch']:,.1f} steps; the run takes {found['epochs']:.2f} epochs"
    ]
