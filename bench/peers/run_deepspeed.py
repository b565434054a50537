"""DeepSpeed ZeRO-Infinity on disk: ZeRO-3 with parameters and optimizer state on NVMe, one CPU process.

The model is built under ``zero.Init``, as its documentation advises for models larger than memory. Options:

- none: buffers, sub-groups and live parameters small, for memory;
- ``pipelined``: larger ones, and the optimizer's reads and writes overlapped, for speed;
- ``initialize``: the model is built in memory and handed to ``deepspeed.initialize``. It fails on a CPU
  without fp16 (README.md, "DeepSpeed"); kept to see when that changes;
- ``non-reentrant``: the default checkpointing of Transformers. It trains on wrong gradients (README.md); kept
  to see when that changes.
"""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from harness import ADAMW, Job, Step, load_model, run
from transformers import AutoConfig
from transformers.integrations import HfDeepSpeedConfig


def configuration(job: Job) -> dict[str, Any]:
    """Return the DeepSpeed configuration; its sizes are numbers of elements."""
    _, microbatches, sequences, _ = job.input_ids().shape
    model = AutoConfig.from_pretrained(job.model)
    # A buffer must hold the largest tensor, which in these models is the embedding or the head.
    largest = model.vocab_size * model.hidden_size
    fast = job.option == "pipelined"
    nvme = {"device": "nvme", "nvme_path": str(job.run_dir / "nvme"), "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": microbatches,
        # The default is 1.0; the other runners do not clip.
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                **nvme,
                "buffer_count": 16 if fast else 10,
                "buffer_size": largest,
                "max_in_cpu": 0,
            },
            "offload_optimizer": {
                **nvme,
                # Pipelining needs three sets of the four states; with one it stops on an assertion.
                "buffer_count": 12 if fast else 4,
                "pipeline_read": fast,
                "pipeline_write": fast,
            },
            "sub_group_size": 10_000_000 if fast else 2_500_000,
            "reduce_bucket_size": largest,
            "stage3_max_live_parameters": 10_000_000 if fast else largest,
            "stage3_max_reuse_distance": 10_000_000 if fast else 0,
            "stage3_prefetch_bucket_size": 5_000_000 if fast else 0,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 1},
    }


def build(job: Job) -> Step:
    config = configuration(job)
    store = torch.distributed.FileStore(str(job.run_dir / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    # Transformers builds models under zero.Init for as long as this object lives.
    keep = None if job.option == "initialize" else HfDeepSpeedConfig(config)
    model = load_model(job, reentrant=job.option != "non-reentrant")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    del keep

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
    run(build)
