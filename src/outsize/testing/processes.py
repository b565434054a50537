"""What processes that are ranks need of their machine, and what torchrun would tell them."""

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody uses at the moment, of the loopback or of another address of this machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def rank_variables(rank: int, size: int, port: int, restarts: int = 0) -> dict[str, str]:
    """Return what torchrun would tell a process about itself."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }
