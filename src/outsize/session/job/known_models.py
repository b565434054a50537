"""Models in the numbers that a plan needs: counted without them, or noted by a trial, and remembered for the user.

What is counted depends on the config of the model, on settings of the run, on the versions of torch, transformers and
PEFT, and on our source: all of them make the name of an entry. So a question about a model that has been asked about
needs no torch. What a trial notes depends on the machine as well.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from outsize import user_cache
from outsize.config import Config
from outsize.runtime.trial.counts import Counts, dump, parse
from outsize.runtime.trial.measured import KnownRows, Row, trial_lengths

_KIND, _TRIALS = "counts", "trials"
# Folders of what decides a count.
_ROOMS = ("compat", "checkpoint/files", "codecs", "config", "model", "optim", "runtime", "session/job")


@dataclass(frozen=True, slots=True)
class Described:
    """A model in transformers' words.

    Attributes:
        kind: its model type, or that of its text part.
        positions: tokens of the longest sequence; None for no limit.
        part: the model type of its text part, where that is what is meant; None where it is the whole model.
        has_more: whether it has parts beside a text part, which a batch of text leaves out, that cannot be built alone.
        stored: the format of its weights and what that allows, where they are quantised.
    """

    kind: str
    positions: int | None
    part: str | None
    has_more: bool = False
    stored: str | None = None


def described(hf_config: Mapping[str, Any]) -> Described:
    """Return what transformers makes of a ``config.json``.

    Raises:
        ModelError: it does not know the architecture, or not with such values.
    """
    name = user_cache.digest_of(["described", hf_config, _here()])
    content = user_cache.load(_KIND, name)
    if content is not None:
        try:
            return Described(**json.loads(content))
        except (TypeError, ValueError):
            pass  # broken: asked again
    from outsize.session.job.model_setup import describe  # torch and transformers take seconds to import

    description = describe(hf_config)
    user_cache.store(_KIND, name, json.dumps(asdict(description)).encode())
    return description


def counted(hf_config: Mapping[str, Any], config: Config) -> Counts:
    """Return what a model takes as a run with ``config`` would train it.

    Raises:
        ModelError: none that a run can train, or one that cannot be counted without its weights.
        ConfigError: adapters for layers that it does not have.
    """
    name = user_cache.digest_of(["counted", hf_config, _settings(config), _here()])
    content = user_cache.load(_KIND, name)
    if content is not None:
        try:
            return parse(content)
        except ValueError:
            pass  # broken: counted again
    from outsize.session.job.model_setup import count_model

    counts = count_model(hf_config, config)
    user_cache.store(_KIND, name, dump(counts))
    return counts


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run that what a model takes may depend on."""
    model, train, optimizer = config.model, config.train, config.optimizer
    return {
        "model": model.model_dump(mode="json", exclude={"path"}),
        "data": [trial_lengths(config.data.seq_len, 2), config.data.pack],
        "train": [train.method, train.mlp_parts, train.head_chunk_tokens],
        "lora": config.lora.model_dump(mode="json") if train.method == "lora" else None,
        "rates": [optimizer.layer_decay, [group.model_dump(mode="json") for group in optimizer.groups]],
    }


class KnownTrials(KnownRows):
    """Notes of the trials of a run, which a second run like it begins with.

    Args:
        model: what tells the model from others, of what JSON knows: units, settings, code, and what computes.
        num_units: of the model, streamed.
    """

    def __init__(self, model: Sequence[Any], num_units: int) -> None:
        super().__init__()
        self._model, self._num_units = model, num_units

    def get(self, name: str) -> list[Row] | None:
        """Return the notes of passes, of this process or of one before."""
        rows = super().get(name)
        if rows is None and (content := user_cache.load(_TRIALS, self._entry(name))) is not None:
            try:
                rows = _rows().validate_json(content)
            except ValueError:
                return None  # broken: tried again
            if any(len(row.kept) not in (self._num_units, self._num_units - 1) for row in rows):
                return None
            super().put(name, rows)
        return rows

    def put(self, name: str, rows: list[Row]) -> None:
        """Remember the notes of passes, for other processes as well."""
        super().put(name, rows)
        user_cache.store(_TRIALS, self._entry(name), _rows().dump_json(rows))

    def _entry(self, name: str) -> str:
        return user_cache.digest_of(["trial", name, self._model, _here()])


@cache
def _rows() -> TypeAdapter[list[Row]]:
    return TypeAdapter(list[Row])


@cache
def _here() -> list[Any]:
    packages = user_cache.versions_of(
        "torch", "transformers", "peft", "liger-kernel", "kernels", "flash-attn", "torchao"
    )
    return [dict(packages), user_cache.source_digest(*_ROOMS)]
