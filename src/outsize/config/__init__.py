"""The run configuration: strict, frozen, described field by field.

Sections lie in files of two or three, and `schema` puts them together. What stands beside a key in its section says
when it has no effect (`section`), and `config_rules` which keys contradict each other. `load` says where the values
come from (flags, ``--set``, environment, file), and `messages` turns a failed check into plain words.
"""

from outsize.config.data_section import DataConfig, EvalConfig, SourceConfig
from outsize.config.load import dump_config, load_config, parse_config
from outsize.config.memory_section import MemoryConfig, ParallelConfig, TransportConfig
from outsize.config.messages import Config
from outsize.config.model_section import ModelConfig, OptimizerConfig
from outsize.config.section import Surroundings
from outsize.config.train_section import LoraConfig, TelemetryConfig, TrainConfig

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
