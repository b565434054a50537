"""FSDP2 with its CPU offload policy, one process on gloo; ``--option compiled`` compiles the blocks."""

import torch
import torch.distributed as dist
from harness import ADAMW, Job, Step, load_model, plain_step, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def build(job: Job) -> Step:
    store = dist.FileStore(str(job.run_dir / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    # Pinned memory needs an accelerator; without one the policy's default raises.
    policy = CPUOffloadPolicy(pin_memory=False)
    model = load_model(job)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW, fused=True))


if __name__ == "__main__":
    run(build)
