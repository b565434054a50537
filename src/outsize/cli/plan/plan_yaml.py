"""A ``train.yaml`` of a predicted run."""

from outsize.accelerators import kind_of
from outsize.cli.plan.plan_question import Asked
from outsize.config import dump_config
from outsize.planner.predict.prediction import Prediction


def train_yaml(request: Asked, prediction: Prediction) -> str:
    """Return the configuration of the predicted run, as YAML."""
    config, budgets = request.config, request.question.budgets
    steps = config.train.steps if request.steps is None else request.steps
    run = config.model_copy(
        update={
            "train": config.train.model_copy(
                update={"steps": steps, "microbatches": prediction.microbatches}
            ),
            "memory": config.memory.model_copy(
                update={
                    "device": _devices(len(request.question.machine.gpus), config.memory.device),
                    "device_memory": budgets.device,
                    "host_memory": budgets.host,
                    "home": prediction.home,
                }
            ),
        }
    )
    return dump_config(run)


def _devices(count: int, device: str) -> str:
    """Return the first ``count`` GPUs as a configuration names them; of one, what was asked for."""
    return f"{kind_of(device)}:" + ",".join(map(str, range(count))) if count > 1 else device
