"""Writing adapters in PEFT's format, unit by unit: ``adapter_model.safetensors`` and ``adapter_config.json``."""

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from outsize import files
from outsize.checkpoint.files.beside_weights import Beside, write_beside
from outsize.checkpoint.files.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from outsize.checkpoint.files.checkpoint_format import FileSum, TensorWriter, bytes_of, sum_the_rest
from outsize.checkpoint.files.checkpoint_map import Chunk, pieces
from outsize.model.adapters import Adapters
from outsize.model.sizes.model_spec import UnitSpec


class AdapterWriter:
    """Writes what ``PeftModel.from_pretrained`` loads. Every method raises `OSError` as the system says.

    Args:
        directory: is there, and holds no checkpoint.
        adapters: of the model.
        units: those that train, in the order in which they will come.

    Attributes:
        files: size and checksum of each file written, by name; all are synced.
    """

    def __init__(self, directory: Path, adapters: Adapters, units: Sequence[UnitSpec]) -> None:
        self.files: dict[str, FileSum] = {}
        self._directory = directory
        self._config = adapters.config
        entries = ((adapters.names[t.name], torch.float32, t.shape) for unit in units for t in unit.tensors)
        self._file: TensorWriter | None = TensorWriter(directory / ADAPTER_WEIGHTS, entries)

    def stream_unit(self, unit: UnitSpec, dtype: torch.dtype, chunks: Iterable[Chunk]) -> None:
        """Write the adapters of ``unit`` from the chunks of its plane of weights."""
        assert self._file is not None
        for start, chunk in chunks:
            for _, _, piece in pieces(unit.tensors, start, chunk):
                self._file.write(bytes_of(piece))

    def shard_of(self, unit: UnitSpec) -> str:
        """Name of the file that holds the adapters of ``unit``."""
        return ADAPTER_WEIGHTS

    def finish(self, hf_config: Any, beside: Beside) -> None:
        """Write everything but weights; ``beside`` are the files beside them."""
        assert self._file is not None
        self.files[ADAPTER_WEIGHTS] = self._file.sync()
        self.close()
        files.write_text(self._directory / ADAPTER_CONFIG, _config_text(self._config))
        write_beside(self._directory, beside)
        sum_the_rest(self._directory, self.files)

    def close(self) -> None:
        """Close the file of weights; idempotent."""
        if self._file is not None:
            self._file.__exit__()
            self._file = None


def _config_text(config: Any) -> str:
    saved = copy.copy(config)
    saved.inference_mode = True  # as PEFT's own save_pretrained says
    entries = {k: sorted(v) if isinstance(v, set) else v for k, v in saved.to_dict().items()}
    return json.dumps(entries, indent=2, sort_keys=True) + "\n"
