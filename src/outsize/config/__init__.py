"""The run configuration: strict, frozen, described field by field.

Each section is a file of its own, and `schema` puts them together. `config_rules` knows which keys contradict each
other, and
`without_effect` which change nothing. `load` says where the values come from (flags, ``--set``, environment, file), and
`messages` turns a failed check into plain words.
"""

from outsize.config.data_section import DataConfig, SourceConfig
from outsize.config.eval_section import EvalConfig
from outsize.config.load import dump_config, load_config, parse_config
from outsize.config.lora_section import LoraConfig
from outsize.config.memory_section import MemoryConfig
from outsize.config.model_section import ModelConfig
from outsize.config.optimizer_section import OptimizerConfig
from outsize.config.parallel_section import ParallelConfig
from outsize.config.schema import Config
from outsize.config.telemetry_section import TelemetryConfig
from outsize.config.train_section import TrainConfig
from outsize.config.transport_section import TransportConfig
from outsize.config.without_effect import Surroundings

__all__ = [
    "Config",
    "DataConfig",
    "EvalConfig",
    "LoraConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SourceConfig",
    "Surroundings",
    "TelemetryConfig",
    "TrainConfig",
    "TransportConfig",
    "dump_config",
    "load_config",
    "parse_config",
]
