"""Train and run language models larger than the memory of the device that computes them.

Importing this package starts no thread, opens no file, touches no GPU and does not import torch.
"""

from outsize.errors import (
    BudgetExceededError,
    CheckpointError,
    ConfigError,
    DataError,
    ExecutionError,
    InfeasiblePlanError,
    ModelError,
    NonFiniteError,
    OutsizeError,
    ProgramError,
    StalledError,
    StorageError,
)

__version__ = "0.1.0"

__all__ = [
    "BudgetExceededError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExecutionError",
    "InfeasiblePlanError",
    "ModelError",
    "NonFiniteError",
    "OutsizeError",
    "ProgramError",
    "StalledError",
    "StorageError",
]
