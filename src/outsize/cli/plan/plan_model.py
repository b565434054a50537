"""The model that ``outsize plan`` is asked about, as it is counted of its ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from outsize.config import Config
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.runtime.trial.counts import Counts
from outsize.session.job.known_models import Described, counted, described

WorkloadOf = Callable[[int], Workload]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """A model as a question has it.

    Attributes:
        spec: its units.
        workload_of: what a microbatch of so many sequences takes.
        in_mlp_parts: the same with MLPs in so many parts; None where they cannot, do already, or are not asked about.
        notes: what was taken for granted, for people.
    """

    spec: ModelSpec
    workload_of: WorkloadOf
    in_mlp_parts: Callable[[int], WorkloadOf] | None = None
    notes: tuple[str, ...] = ()


class AskedModel:
    """A model by its ``config.json``.

    Args:
        path: where it lies, as a configuration names it.
        hf_config: of the model.
    """

    def __init__(self, path: str, hf_config: Mapping[str, Any]) -> None:
        self.path = path
        self._hf_config = hf_config

    @cached_property
    def _described(self) -> Described:
        return described(self._hf_config)

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence; None for no limit."""
        return self._described.positions

    def figures(self, config: Config) -> ModelFigures:
        """Return the model as a run with ``config`` would train it.

        Raises:
            ModelError: none that a run can train, or its config lacks a size.
            ConfigError: adapters for layers that it does not have.
        """
        kind, part = self._described.kind, self._described.part
        found = counted(self._hf_config, config)
        notes = () if part is None else (f"of this model its text part alone, {part}, is planned",)
        as_they_are = config.model.compile == "off" and config.model.kernels == "none"
        return ModelFigures(
            spec=found.spec,
            workload_of=_workload_of(found, config),
            in_mlp_parts=self._in_parts(config) if found.can_part and as_they_are else None,
            notes=(
                *notes,
                f"counted on the model that transformers builds of a {kind} config, without weights",
            ),
        )

    def _in_parts(self, config: Config) -> Callable[[int], WorkloadOf]:
        def parted(mlp_parts: int) -> WorkloadOf:
            train = config.train.model_copy(update={"mlp_parts": mlp_parts})
            cut = config.model_copy(update={"train": train})
            return _workload_of(counted(self._hf_config, cut), cut)

        return parted


def _workload_of(found: Counts, config: Config) -> WorkloadOf:
    seq_len = config.data.seq_len
    if config.model.compile == "blocks":
        return lambda sequences: _compiled(found.workload(sequences, seq_len))
    return lambda sequences: found.workload(sequences, seq_len)


def adapted_modules(text: str | None) -> str | tuple[str, ...] | None:
    """Return the layers with adapters as a configuration names them; None for PEFT's choice."""
    if text is None or text.strip() == "all-linear":
        return text and text.strip()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _compiled(work: Workload) -> Workload:
    """Return what compiled blocks take: nothing from within is kept by itself, and no recompute ends early."""
    return replace(
        work,
        recompute_flops=work.forward_flops,
        attention_bytes=(),
        attention_flops=(),
        products_bytes=(),
    )
