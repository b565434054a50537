"""Rows of the table for transfers: links, copies between GPUs, NCCL; see `outsize.doctor.rules`."""

from typing import Final

from outsize.doctor import device_rules, finding, link_rules
from outsize.doctor.finding import Rule

PROBE_AGAIN = "outsize probe --compare machine.json"
STALL_SHARE = "stall_share and stall_owner in heartbeat.jsonl of the next run"
TRANSFER_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        id="link-narrow",
        part="link",
        look=link_rules.narrow,
        causes=(
            "the slot has fewer lanes than it is long, or shares them with another slot or an M.2 drive",
            "a riser, cable or card that is not seated well: lanes that fail to train are dropped",
            "the firmware splits the slot (bifurcation)",
        ),
        fix="another slot (the board's manual says which has all lanes); seat the card anew; firmware: slot as x16",
        verify="nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.width.max --format=csv",
    ),
    Rule(
        id="link-slow",
        part="link",
        look=link_rules.slow,
        causes=(
            "the link trained at an older generation: riser, cable, or a setting of the firmware",
            "a switch or bridge above the GPU with a narrower uplink",
            "host memory of another NUMA node, or other traffic while it was probed",
        ),
        fix="compare the generation under load with its maximum; firmware: PCIe generation of the slot",
        verify=(
            "nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.gen.max --format=csv while `outsize probe` runs: "
            "an idle link is slow on purpose"
        ),
    ),
    Rule(
        id="link-downtrained",
        part="link",
        look=device_rules.downtrained,
        causes=(
            "the firmware sets the generation of the slot, or the board offers less there",
            "a riser or cable that does not carry the higher rate",
            "errors on the link: it falls back and stays there until the next boot",
        ),
        fix="firmware: PCIe generation of the slot; seat the card anew, or another riser; then boot",
        verify=PROBE_AGAIN,
    ),
    Rule(
        id="pinning-refused",
        part="link",
        look=link_rules.pageable,
        causes=(
            "a limit of locked memory (memlock)",
            "RAM is short, or the control group's limit is reached",
            "WSL2, or a sandbox that hides what the driver needs",
        ),
        fix=(finding.raised_pin_limits, "more free RAM"),
        verify="outsize probe: a fit stands beside the link's pinned path",
    ),
    Rule(
        id="copies-not-hidden",
        part="link",
        look=device_rules.no_overlap,
        causes=(
            "a product and copies that both wait for the GPU's memory",
            "one copy engine for both directions, or a virtual GPU",
            "CUDA_LAUNCH_BLOCKING=1",
        ),
        fix="unset CUDA_LAUNCH_BLOCKING; more tokens per step (train.tokens_per_step), where copies matter less",
        verify=PROBE_AGAIN,
    ),
    Rule(
        id="copies-contend",
        part="link",
        look=device_rules.contended,
        causes=(
            "several GPUs below one switch or bridge",
            "host memory that cannot serve all of them",
            "one NUMA node that holds all pinned memory",
        ),
        fix="CUDA_VISIBLE_DEVICES: fewer GPUs per switch where there is a choice; memory bound to the GPUs' nodes",
        verify="outsize probe: together in machine.json",
    ),
    Rule(
        id="peer-slow",
        part="link",
        look=device_rules.peer_staged,
        causes=(
            "access control (ACS) or an IOMMU sends peer copies by way of the root complex",
            "NVLink bridges that are not seated",
            "a driver that accepts peer access and stages",
        ),
        fix="nvidia-smi nvlink --status; without virtual machines, ask whoever keeps the firmware about ACS",
        verify="outsize probe: peers in machine.json",
    ),
    Rule(
        id="iommu-translates",
        part="link",
        look=device_rules.translating_iommu,
        causes=("the default of the distribution", "virtual machines that ran here before"),
        fix="ask whoever keeps the machine about iommu=pt on the kernel's command line: advice, nothing is set for you",
        verify="cat /proc/cmdline, then " + PROBE_AGAIN,
    ),
    Rule(
        id="small-copies",
        part="link",
        look=link_rules.small_copies,
        causes=("units of few parameters: each load is one copy, and pays its fixed cost",),
        fix=(finding.further_ahead, "more tokens per step (train.tokens_per_step), where copies matter less"),
        verify=STALL_SHARE,
    ),
    Rule(
        id="copies-pageable",
        part="link",
        look=link_rules.fell_to_pageable,
        causes=(
            "a limit of locked memory (memlock) below what the run holds in RAM",
            "RAM was short, or the control group's limit was reached, when the run began",
        ),
        fix="ulimit -l unlimited (containers: --ulimit memlock=-1), or a smaller memory.host_memory; then start again",
        verify="fallbacks in heartbeat.jsonl of the next run: no `pageable`",
    ),
    Rule(
        id="numa-wrong-node",
        part="link",
        look=link_rules.wrong_node,
        causes=(
            "bound to processors of another node: taskset, numactl, Slurm, or a container's cpuset; a run "
            "(memory.numa) never leaves those",
        ),
        fix="numactl --cpunodebind=NODE --membind=NODE outsize train run.yaml, with the node of the evidence",
        verify="outsize probe --compare machine.json under the same numactl",
    ),
    Rule(
        id="numa-far-memory",
        part="link",
        look=device_rules.far_memory,
        causes=(
            "a process that is not bound has its pages on whichever node first writes them: a run binds itself to the "
            "node of its device (memory.numa) only where processors and memory there suffice",
        ),
        fix="leave memory.numa auto, and set OMP_NUM_THREADS to a node's cores where `numa` in run.json says that "
        "threads are too many; else numactl --cpunodebind=NODE --membind=NODE outsize train run.yaml",
        verify="numa in run.json, or numastat -p PID: pages on one node",
    ),
    Rule(
        id="nccl-overridden",
        part="link",
        look=link_rules.overridden,
        causes=("left over from a search for an error", "copied from another machine"),
        fix="unset the variables; set one again only where a benchmark on this machine shows that it helps",
        verify="outsize all-reduce with and without",
    ),
    Rule(
        id="sums-slow",
        part="link",
        look=link_rules.slow_sums,
        causes=(
            "NCCL takes sockets instead of shared memory or peer copies: a container without /dev/shm, or a variable",
            "GPUs below different processors, and memory of only one of them",
        ),
        fix="NCCL_DEBUG=INFO outsize all-reduce --backend nccl names the transports; docker run --ipc=host",
        verify="outsize all-reduce --output machine.json, then outsize doctor --machine machine.json",
    ),
    Rule(
        id="nccl-misspelt",
        part="link",
        look=link_rules.misspelt,
        causes=("a typing mistake", "advice that was never true: NCCL_TIMEOUT is no variable"),
        fix="the name in the evidence; a time limit is an argument: torch.distributed.init_process_group(timeout=...)",
        verify="NCCL_DEBUG=INFO names the variables that were read",
    ),
)
