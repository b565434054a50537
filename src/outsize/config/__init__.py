"""The run configuration: strict, frozen, described field by field.

`schema` says what can be configured, `load` where the values come from (flags, ``--set``, environment, file),
`messages` turns a failed check into plain words, and `rules` holds what concerns more than one key.
"""

from outsize.config.load import dump_config, load_config, parse_config
from outsize.config.schema import (
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

__all__ = [
    "Config",
    "DataConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "TrainConfig",
    "dump_config",
    "load_config",
    "parse_config",
]
