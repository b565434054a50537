"""The model that ``outsize plan`` is asked about: from its config's sizes, or of any other architecture counted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outsize.config import Config
from outsize.errors import ConfigError
from outsize.model.sizes.lora_from_config import (
    ALL_LINEAR,
    adapted_workload,
    parse_modules,
    with_adapters,
    with_frozen,
)
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.model.sizes.positions import num_positions
from outsize.model.sizes.spec_from_config import FAMILIES, read_shape, spec_from_config
from outsize.model.sizes.workload import count_workload

if TYPE_CHECKING:
    from outsize.session.job.counted_model import Described

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
    """A model by its ``config.json``; where that tells no sizes, transformers and torch are asked.

    Args:
        path: where it lies, as a configuration names it.
        hf_config: of the model.
    """

    def __init__(self, path: str, hf_config: Mapping[str, Any]) -> None:
        self.path = path
        self._given = hf_config

    @cached_property
    def _described(self) -> "Described | None":
        """What transformers makes of a config that tells no sizes."""
        if self._given.get("model_type") in FAMILIES:
            return None
        from outsize.session.job.counted_model import (
            describe,  # torch and transformers take seconds to import
        )

        return describe(self._given)

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The config that tells sizes, where one does: that of the model or of its text part."""
        return self._given if self._described is None else self._described.config.to_dict()

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence; None for no limit."""
        if self._described is None:
            return num_positions(self._given)
        return num_positions(self._described.config.to_dict())

    @property
    def tells_sizes(self) -> bool:
        """Whether the model's sizes follow from its config alone."""
        return self.hf_config.get("model_type") in FAMILIES

    def modules(self, text: str | None) -> str | tuple[str, ...] | None:
        """Return the adapted layers as a configuration names them; None for PEFT's choice.

        Raises:
            ConfigError: no family whose config tells its sizes has such a layer.
        """
        if text is not None and text.strip() == ALL_LINEAR:
            return ALL_LINEAR
        if self.tells_sizes:
            return parse_modules(text)
        return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())

    def figures(self, config: Config) -> ModelFigures:
        """Return the model as a run with ``config`` would train it.

        Raises:
            ModelError: none that a run can train, or its config lacks a size.
            ConfigError: adapters for layers that it does not have.
        """
        found, model = self._with_own_blocks(config), config.model
        if model.compile == "off" and model.kernels == "none":
            return found
        of = found.workload_of
        return replace(
            found,
            workload_of=(lambda sequences: _compiled(of(sequences))) if model.compile == "blocks" else of,
            in_mlp_parts=None,  # neither goes with parts
        )

    def _with_own_blocks(self, config: Config) -> ModelFigures:
        part = None if self._described is None else self._described.part
        notes = () if part is None else (f"of this model its text part alone, {part}, is planned",)
        if self.tells_sizes:
            return _from_sizes(self.hf_config, config, notes)
        from outsize.session.job.counted_model import count_model

        assert self._described is not None
        described, seq_len = self._described.config, config.data.seq_len

        def parted(mlp_parts: int) -> WorkloadOf:
            train = config.train.model_copy(update={"mlp_parts": mlp_parts})
            cut = count_model(described, config.model_copy(update={"train": train}))
            return lambda sequences: cut.workload_of(sequences, seq_len)

        found = count_model(described, config)
        kind = self.hf_config["model_type"]
        counted = f"counted on the model that transformers builds of a {kind} config, without weights"
        return ModelFigures(
            spec=found.spec,
            workload_of=lambda sequences: found.workload_of(sequences, seq_len),
            in_mlp_parts=parted if found.can_part else None,
            notes=(*notes, counted),
        )


def _compiled(work: Workload) -> Workload:
    """Return what compiled blocks take: nothing from within is kept by itself, and no recompute ends early."""
    return replace(
        work,
        recompute_flops=work.forward_flops,
        attention_bytes=(),
        attention_flops=(),
        products_bytes=(),
    )


def adapters_of(config: Config) -> tuple[int, tuple[str, ...], tuple[str, ...]] | None:
    """Return rank, modules and parameters of adapters of a family's model; None where all is trained."""
    if config.train.method != "lora":
        return None
    named = config.lora.target_modules
    text = None if named is None else named if isinstance(named, str) else ",".join(named)
    return config.lora.r, parse_modules(text), config.lora.target_parameters or ()


def _from_sizes(hf_config: Mapping[str, Any], config: Config, notes: tuple[str, ...]) -> ModelFigures:
    shape, dtype = read_shape(hf_config), config.model.dtype
    whole, adapters = spec_from_config(hf_config, dtype), adapters_of(config)
    spec = whole if adapters is None else with_adapters(whole, *adapters)

    def parted(mlp_parts: int) -> WorkloadOf:
        cut = replace(
            shape if adapters is None else with_frozen(shape, spec),
            mlp_parts=mlp_parts,
            fused=config.model.kernels == "liger",
        )

        def workload_of(sequences: int) -> Workload:
            plain = count_workload(
                cut,
                dtype,
                sequences=sequences,
                seq_len=config.data.seq_len,
                chunk_tokens=config.train.head_chunk_tokens,
            )
            return plain if adapters is None else adapted_workload(plain, spec)

        return workload_of

    return ModelFigures(
        spec=spec,
        workload_of=parted(config.train.mlp_parts),
        in_mlp_parts=parted if config.train.mlp_parts == 1 else None,
        notes=notes,
    )


def check_largest(model: AskedModel) -> None:
    """Refuse to make a model larger whose config does not tell its sizes.

    Raises:
        ConfigError: it does not.
    """
    if not model.tells_sizes:
        raise ConfigError(
            f"--largest grows models by the sizes in their configs, of {', '.join(FAMILIES)}; leave it out for this one"
        )
