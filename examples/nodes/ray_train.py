"""Several machines with Ray Train: ``python ray_train.py train.yaml --workers 2 [--gpu]``.

Ray finds the machines, starts a worker for each rank, and starts all again when one is lost. Each worker runs `outsize
train` as a process of its own: Ray's training loops run in a thread, where a process cannot listen to signals.
"""

import argparse
import os
import socket
import subprocess
import sys


def one_rank(settings):
    """Run one rank: Ray has told it who it is, and where rank 0 is."""
    import torch.distributed as dist

    # Ray's own process group listens at MASTER_PORT; the ranks of the run meet at another port of rank 0's machine.
    port = [None]
    if dist.get_rank() == 0:
        with socket.socket() as unused:
            unused.bind(("0.0.0.0", 0))
            port = [unused.getsockname()[1]]
    dist.broadcast_object_list(port)
    environment = {**os.environ, "MASTER_PORT": str(port[0])}
    subprocess.run(
        [sys.executable, "-m", "outsize", "train", settings["config"]], check=True, env=environment
    )


def main():
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="YAML file, at the same path on all machines; with train.resume: auto")
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each")
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        one_rank,
        train_loop_config={"config": os.path.abspath(arguments.config)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
