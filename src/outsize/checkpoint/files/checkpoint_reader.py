"""Reading parameters, a stretch at a time, from a checkpoint on disk.

A model is never in memory as a whole. `CheckpointReader` finds out first, from headers alone, that every
parameter is there and has its shape; then ``read`` fills whatever piece of memory the caller has for elements
``[start, stop)``.
"""

import logging
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from outsize.checkpoint.files.checkpoint_files import find_tensors
from outsize.checkpoint.files.checkpoint_format import read_elements, read_tensor
from outsize.checkpoint.files.checkpoint_map import Conversion, map_tensors
from outsize.checkpoint.files.quantised import decoded
from outsize.errors import CheckpointError

logger = logging.getLogger(__name__)

_COMPARED_ELEMENTS = 1 << 20
_SHOWN = 3  # names in a message


class WeightSource(Protocol):
    """Something that parameters can be read from."""

    def read(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """Copy flattened elements ``[start, stop)`` of parameter ``name`` into ``into``, cast to its dtype.

        ``into`` is a contiguous CPU tensor of ``stop - start`` elements. A tied parameter may go by any of
        its names.
        """


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return all names of each parameter of ``model``, as it is now: in a run, parameters come and go."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return tuple(map(tuple, names_of.values()))


class CheckpointReader:
    """The parameters of a Hugging Face checkpoint directory. For one thread at a time.

    Plain tensors are read in place, with at most 8 MiB beside them. Where stored tensors have to be merged or
    split, what came of the last conversion is kept until the next: one parameter, or one expert of a mixture.

    Attributes:
        directory: the checkpoint.
        unexpected: names of stored tensors that the model has no use for.
        lacking: names of parameters that are not stored, where such may be.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model_skeleton: nn.Module,
        tied: Sequence[Sequence[str]] | None = None,
        *,
        may_lack: bool = False,
    ) -> None:
        """Check headers, names and shapes; reads no weights but tied ones that are stored twice.

        Args:
            directory: the checkpoint.
            model_skeleton: the model.
            tied: all names of each parameter, see `tied_names`; None asks the model.
            may_lack: whether what belongs to no layer, such as a head, may be missing.

        Raises:
            CheckpointError: a file is missing or truncated, or tensors are missing or of another shape.
        """
        self.directory = Path(directory)
        self._map = map_tensors(model_skeleton, decoded(find_tensors(self.directory), self.directory))
        self._buffers = persistent_buffers(model_skeleton)
        self._shapes = {n: tuple(p.shape) for n, p in model_skeleton.named_parameters(remove_duplicate=False)}
        self._converted: tuple[tuple[str, int | None], dict[str, Tensor]] | None = None
        self._check_shapes()
        self._stored_name, self.lacking = self._resolve(
            model_skeleton, tied_names(model_skeleton) if tied is None else tied, may_lack
        )
        self.unexpected = _without_ignored(model_skeleton, self._map.unexpected)
        if self.unexpected:
            logger.warning("%s: not used: %s", self.directory, _some(self.unexpected))

    def read(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """Read flattened elements ``[start, stop)`` of parameter ``name`` into ``into``, cast to its dtype.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
            KeyError: the model has no such parameter.
        """
        source = self._stored_name[name]
        if source in self._map.plain:
            read_elements(self._map.plain[source], start, stop, into)
        else:
            self._read_converted(source, start, stop, into.view(-1))

    def load_buffers(self, model: nn.Module) -> None:
        """Copy the buffers that the checkpoint stores (router corrections, say) into those of ``model``."""
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for name in self._buffers:
            if name in self._map.plain:
                buffers[name].copy_(read_tensor(self._map.plain[name]))
            elif name in self._map.converted:
                buffers[name].copy_(self._map.converted[name].convert()[name])
            else:
                logger.warning("%s: %s is not stored and keeps its initial value", self.directory, name)

    def release(self) -> None:
        """Let go of what the last conversion made."""
        self._converted = None

    def _read_converted(self, name: str, start: int, stop: int, flat: Tensor) -> None:
        """As `read`, for a parameter that a conversion makes: row by row where it can be, else as a whole."""
        conversion = self._map.converted[name]
        shape = self._map.shapes[name]
        numel = torch.Size(shape).numel()
        if not (0 <= start <= stop <= numel and flat.numel() == stop - start):
            raise ValueError(f"elements [{start}, {stop}) of {numel} do not fit {flat.numel()}: {name}")
        piece = numel // conversion.num_rows if conversion.num_rows else max(1, numel)
        for first in range(start // piece * piece, stop, piece):
            row = first // piece if conversion.num_rows else None
            begin, end = max(start, first), min(stop, first + piece)
            converted = self._convert(conversion, row)[name].reshape(-1)
            flat[begin - start : end - start].copy_(converted[begin - first : end - first])

    def _convert(self, conversion: Conversion, row: int | None) -> dict[str, Tensor]:
        """Return what ``conversion`` makes (of ``row``), from the last time or anew."""
        key = (conversion.target, row)
        if self._converted is None or self._converted[0] != key:
            self._converted = None  # before the next one is made
            self._converted = (key, conversion.convert(row))
        return self._converted[1]

    def _check_shapes(self) -> None:
        """Raise if a parameter or buffer is stored in another shape, or in a dtype that cannot be trained."""
        wanted = self._shapes | {name: tuple(buffer.shape) for name, buffer in self._buffers.items()}
        for name, shape in self._map.shapes.items():
            if name not in wanted:
                continue
            plain = self._map.plain.get(name)
            stored = (plain,) if plain else tuple(s for _, s in self._map.converted[name].sources)
            where = f"{stored[0].path}: {stored[0].name}"
            if len(stored) > 1:
                where += f" and {len(stored) - 1} more"
            if shape != wanted[name]:
                raise CheckpointError(
                    f"{where}: shape {shape}, but {name} has shape {wanted[name]} by config.json; "
                    "weights and config.json do not belong together"
                )
            unfit = [s.dtype for s in stored if name in self._shapes and s.dtype not in _TRAINABLE]
            if unfit:
                raise CheckpointError(
                    f"{where}: stored as {unfit[0]}, which cannot be trained; "
                    "use the full-precision checkpoint"
                )

    def _resolve(
        self, model: nn.Module, tied: Sequence[Sequence[str]], may_lack: bool
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the name under which each parameter is stored, for tied ones any of its names; and what may lack."""
        resolved, missing = {}, []
        for names in tied:
            present = [name for name in names if name in self._map.shapes]
            if not present:
                missing.append(names[0])
                continue
            self._check_tied(present)
            resolved.update(dict.fromkeys(names, present[0]))
        lacking = tuple(name for name in missing if may_lack and not _OF_A_LAYER.search(name))
        if len(missing) > len(lacking):
            unused = f"; there but not used: {_some(self._map.unexpected)}" if self._map.unexpected else ""
            raise CheckpointError(
                f"{self.directory} lacks {len(missing)} tensors of {type(model).__name__}: {_some(missing)}"
                f"{unused}; weights and config.json do not belong together, or the download is not complete"
            )
        return resolved, lacking

    def _check_tied(self, names: Sequence[str]) -> None:
        """Raise if one tied parameter is stored under several names with different values."""
        copies = [self._map.plain[name] for name in names if name in self._map.plain]
        for first, other in pairwise(copies):
            for start in range(0, first.numel, _COMPARED_ELEMENTS):
                stop = min(start + _COMPARED_ELEMENTS, first.numel)
                a, b = (torch.empty(stop - start, dtype=torch.float32) for _ in range(2))
                read_elements(first, start, stop, a)
                read_elements(other, start, stop, b)
                if not torch.equal(a, b):
                    raise CheckpointError(
                        f"{self.directory}: {first.name} and {other.name} differ, but config.json ties them; "
                        'set "tie_word_embeddings": false there'
                    )


_OF_A_LAYER = re.compile(r"\.\d+\.")
_TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict holds."""
    stored = model.state_dict(keep_vars=True)
    return {name: b for name, b in model.named_buffers(remove_duplicate=False) if name in stored}


def _without_ignored(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``names`` less those that the architecture says to ignore, and buffers computed anew."""
    patterns = getattr(cast(Any, model), "_keys_to_ignore_on_load_unexpected", None) or ()
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return tuple(n for n in names if n not in buffers and not any(re.search(p, n) for p in patterns))


def _some(names: list[str] | tuple[str, ...]) -> str:
    """Return a few of ``names``, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
