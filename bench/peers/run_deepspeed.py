"""DeepSpeed ZeRO-Infinity on disk: ZeRO-3 with parameters and optimizer state on NVMe, one process, CPU device.

The model is built under ``zero.Init``, as its documentation advises for models larger than memory; with
``--option initialize`` it is built in memory first and handed to ``deepspeed.initialize``.
"""

import os
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from harness import ADAMW, Job, Step, load_model, run
from transformers.integrations import HfDeepSpeedConfig


def configuration(job: Job) -> dict[str, Any]:
    """Return the DeepSpeed configuration; sizes are elements."""
    nvme = str(job.run_dir / "nvme")
    largest = 8192 * 768
    return {
        "train_micro_batch_size_per_gpu": int(job.input_ids().shape[2]),
        "gradient_accumulation_steps": job.num_microbatches,
        # Its default is 1.0; the other runners do not clip.
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": nvme,
                "pin_memory": False,
                "buffer_count": 16,
                "buffer_size": largest,
                "max_in_cpu": 0,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": nvme,
                "pin_memory": False,
                "buffer_count": 4,
                "pipeline_read": True,
                "pipeline_write": True,
            },
            "sub_group_size": 10_000_000,
            "stage3_max_live_parameters": 10_000_000,
            "stage3_max_reuse_distance": 10_000_000,
            "stage3_prefetch_bucket_size": 5_000_000,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 1},
    }


def build(job: Job) -> Step:
    config = configuration(job)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(job.run_dir / "store"), 1), rank=0, world_size=1
    )
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    # Transformers builds the model under zero.Init for as long as this object lives.
    keep = None if job.option == "initialize" else HfDeepSpeedConfig(config)
    model = load_model(job)
    del keep
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(microbatches: Sequence[torch.Tensor]) -> float:
        total = 0.0
        for input_ids in microbatches:
            loss = engine(input_ids=input_ids, labels=input_ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(microbatches)
        return total

    return step


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run("deepspeed", build)
