"""Plain PyTorch with everything in memory: the reference of every other runner.

``--option no-checkpointing`` keeps all activations instead of recomputing them; ``compiled`` compiles the blocks.
"""

import torch
from harness import ADAMW, Job, Step, load_model, plain_step, run


def build(job: Job) -> Step:
    model = load_model(job, checkpointing=job.option != "no-checkpointing")
    return plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW, fused=True))


if __name__ == "__main__":
    run(build)
