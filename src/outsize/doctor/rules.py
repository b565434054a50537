"""The table: every rule, what it slows down, its likely causes, its fix, and how to see that it helped.

A function looks at what was recorded and says what it sees; everything that does not depend on numbers stands here. The
order of rows decides nothing: findings are ranked by gain.
"""

from typing import Final

from outsize.doctor import (
    compute_rules,
    device_rules,
    disk_rules,
    host_rules,
    link_rules,
    nccl,
    peer_rules,
    run_rules,
)
from outsize.doctor.finding import Rule
from outsize.doctor.wait_rules import waits_for

_PROBE_AGAIN = "outsize probe --compare machine.json"
_SHARE = "stall_share and stall_owner in heartbeat.jsonl of the next run"
_MORE_TOKENS = (
    "train.tokens_per_step (with train.microbatches) twice as large: what waits is paid once per step"
)

RULES: Final[tuple[Rule, ...]] = (
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
        look=peer_rules.downtrained,
        causes=(
            "the firmware sets the generation of the slot, or the board offers less there",
            "a riser or cable that does not carry the higher rate",
            "errors on the link: it falls back and stays there until the next boot",
        ),
        fix="firmware: PCIe generation of the slot; seat the card anew, or another riser; then boot",
        verify=_PROBE_AGAIN,
    ),
    Rule(
        id="pinning-refused",
        part="link",
        look=link_rules.pageable,
        causes=(
            "a limit of locked memory (memlock)",
            "RAM is short, or the control group's limit is reached",
            "a sandbox that hides what the driver needs",
        ),
        fix="ulimit -l unlimited (containers: --ulimit memlock=-1); more free RAM",
        verify="outsize probe: a fit stands beside the link's pinned path",
    ),
    Rule(
        id="pinned-rounded-up",
        part="run",
        look=peer_rules.rounded_up,
        causes=("torch's pinned allocator rounds each request up to a power of two",),
        fix="in loops of your own: PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1, or memory pinned by outsize",
        verify="outsize probe: taken_bytes of torch pin_memory in machine.json",
    ),
    Rule(
        id="copies-not-hidden",
        part="link",
        look=peer_rules.no_overlap,
        causes=(
            "a product and copies that both wait for the GPU's memory",
            "one copy engine for both directions, or a virtual GPU",
            "CUDA_LAUNCH_BLOCKING=1",
        ),
        fix="unset CUDA_LAUNCH_BLOCKING; more tokens per step (train.tokens_per_step), where copies matter less",
        verify=_PROBE_AGAIN,
    ),
    Rule(
        id="copies-contend",
        part="link",
        look=peer_rules.contended,
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
        look=peer_rules.peer_staged,
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
        look=peer_rules.translating_iommu,
        causes=("the default of the distribution", "virtual machines that ran here before"),
        fix="ask whoever keeps the machine about iommu=pt on the kernel's command line: advice, nothing is set for you",
        verify="cat /proc/cmdline, then " + _PROBE_AGAIN,
    ),
    Rule(
        id="small-copies",
        part="link",
        look=link_rules.small_copies,
        causes=("units of few parameters: each load is one copy, and pays its fixed cost",),
        fix="memory.prefetch: 2 or more, so that loads are on the way while compute works",
        verify=_SHARE,
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
        look=peer_rules.far_memory,
        causes=(
            "a process that is not bound has its pages on whichever node first writes them: a run binds itself to the "
            "node of its device (memory.numa) only where processors and memory there suffice",
        ),
        fix="leave memory.numa auto, and set OMP_NUM_THREADS to a node's cores where `numa` in run.json says that "
        "threads are too many; else numactl --cpunodebind=NODE --membind=NODE outsize train run.yaml",
        verify="numa in run.json, or numastat -p PID: pages on one node",
    ),
    Rule(
        id="shared-uplink",
        part="link",
        look=link_rules.shared_uplink,
        causes=("the board or the chassis hangs several GPUs on one switch",),
        fix="train on GPUs of different bridges where there is a choice: CUDA_VISIBLE_DEVICES",
        verify="nvidia-smi topo -m: PIX and PXB stand for a shared bridge",
    ),
    Rule(
        id="peer-access-off",
        part="link",
        look=link_rules.no_peer_access,
        causes=(
            "the driver does not offer it for these GPUs",
            "access control (ACS) on bridges, or an IOMMU that translates, on a machine without virtual machines",
        ),
        fix="nothing in outsize needs it; without virtual machines, ask whoever keeps the firmware about ACS",
        verify="nvidia-smi topo -p2p r",
    ),
    Rule(
        id="cgroup-memory",
        part="run",
        look=host_rules.group_limit,
        causes=("the limit of the container or of the batch job", "other processes of the same group"),
        fix="a higher limit (docker run --memory, Slurm --mem), or memory.host_memory below it; memory.home: disk",
        verify="cat /sys/fs/cgroup/memory.events: oom and max do not grow",
    ),
    Rule(
        id="memlock-low",
        part="link",
        look=host_rules.locked_memory,
        causes=("the default limit of the distribution or of the container",),
        fix="ulimit -l unlimited (containers: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)",
        verify="outsize probe: a fit stands beside the link's pinned path",
    ),
    Rule(
        id="swap-active",
        part="run",
        look=host_rules.swapping,
        causes=("budgets larger than what is free", "other processes"),
        fix="a smaller memory.host_memory, or memory.home: disk, which reads in order what swap reads page by page",
        verify="cat /proc/pressure/memory: avg60 of `some` near 0",
    ),
    Rule(
        id="cpu-quota",
        part="host",
        look=host_rules.quota,
        causes=("a container with a processor quota: libraries count the processors that they see",),
        fix="OMP_NUM_THREADS=CORES of the quota, rounded down",
        verify="nr_throttled in /sys/fs/cgroup/cpu.stat stands still",
    ),
    Rule(
        id="native-missing",
        part="host",
        look=host_rules.kernels,
        causes=("outsize was installed where there is no C compiler", "OUTSIZE_NATIVE=0 in the environment"),
        fix="a C compiler (apt install gcc), then pip install --force-reinstall --no-deps outsize",
        verify="outsize probe: the row `C kernels` names an instruction set",
    ),
    Rule(
        id="cpu-clock-limited",
        part="host",
        look=host_rules.clock_limit,
        causes=("a power-saving governor", "a limit set by the administrator, or a laptop on battery"),
        fix="cpupower frequency-set --governor performance (needs root)",
        verify=_PROBE_AGAIN,
    ),
    Rule(
        id="gpu-throttled",
        part="compute",
        look=device_rules.gpu_clocks,
        causes=("cooling", "a power limit below the board's", "a supply that cannot give more"),
        fix="nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE says which; cooling, or nvidia-smi -pl WATTS (needs root)",
        verify="nvidia-smi --query-gpu=clocks_event_reasons.active,clocks.sm --format=csv during a run",
    ),
    Rule(
        id="rate-sags",
        part="compute",
        look=device_rules.sagging,
        causes=(
            "heat",
            "a power limit",
            "a virtual machine that has used up its credit",
            "other work that began",
        ),
        fix="cooling; another kind of instance; a quiet machine",
        verify="outsize probe --full: samples of the product in machine.json",
    ),
    Rule(
        id="probe-not-quiet",
        part="run",
        look=host_rules.not_quiet,
        causes=("another job", "a build or a download that was still going on"),
        fix="probe again when nothing else runs",
        verify="uptime, then " + _PROBE_AGAIN,
    ),
    Rule(
        id="disk-unsuitable",
        part="disk",
        look=disk_rules.poor_disk,
        causes=("the directory lies on a network, overlay or memory file system", "an old drive"),
        fix="memory.store_dir: a directory on a local NVMe with ext4 or XFS",
        verify="outsize probe --directory DIR",
    ),
    Rule(
        id="disk-sags",
        part="disk",
        look=disk_rules.sagging_disk,
        causes=("the drive's fast cache is full", "heat", "a virtual disk that has used up its credit"),
        fix="memory.store_dir on a drive made for writes; memory.home: host where it fits; fewer, larger steps",
        verify="outsize probe --full --directory DIR: sustained_write_bytes_per_s in machine.json",
    ),
    Rule(
        id="attention-unfused",
        part="compute",
        look=device_rules.slow_attention,
        causes=(
            "a torch build without the fused kernel for this GPU",
            "a GPU too old for it",
            "a broken install",
        ),
        fix="a torch build for this CUDA version; torch.nn.attention.sdpa_kernel names the kernel and says why not",
        verify=_PROBE_AGAIN,
    ),
    Rule(
        id="attention-eager",
        part="compute",
        look=run_rules.eager_attention,
        causes=("model.attention in the configuration",),
        fix="model.attention: sdpa",
        verify="backward_s and forward_s in heartbeat.jsonl; outsize verify, since sums are taken in another order",
    ),
    Rule(
        id="nccl-overridden",
        part="link",
        look=nccl.overridden,
        causes=("left over from a search for an error", "copied from another machine"),
        fix="unset the variables; set one again only where a benchmark on this machine shows that it helps",
        verify="all_reduce_perf of nccl-tests with and without",
    ),
    Rule(
        id="nccl-misspelt",
        part="link",
        look=nccl.misspelt,
        causes=("a typing mistake", "advice that was never true: NCCL_TIMEOUT is no variable"),
        fix="the name in the evidence; a time limit is an argument: torch.distributed.init_process_group(timeout=...)",
        verify="NCCL_DEBUG=INFO names the variables that were read",
    ),
    Rule(
        id="loader-bound",
        part="run",
        look=waits_for("data"),
        causes=("tokenising or decompressing while training", "a slow disk or network under data.path"),
        fix="data.path: tokens made beforehand, or a local disk",
        verify="data_s in heartbeat.jsonl",
    ),
    Rule(
        id="host-bound",
        part="run",
        look=waits_for("python"),
        causes=(
            "ops too short for what it takes to hand them out: a small model, or few tokens per microbatch",
            "other work on the same processors",
            "Python in the model's forward",
        ),
        fix="fewer, larger microbatches (train.microbatches down, or data.seq_len up), until memory is the limit",
        verify="stall_s.dispatch in heartbeat.jsonl",
    ),
    Rule(
        id="optimizer-bound",
        part="run",
        look=waits_for("host"),
        causes=("few tokens per step: each step pays the whole optimizer", "slow host memory, or few cores"),
        fix=_MORE_TOKENS,
        verify=_SHARE,
    ),
    Rule(
        id="disk-bound",
        part="run",
        look=waits_for("disk"),
        causes=(
            "few tokens per step: each step reads and writes the whole state",
            "a slow disk",
            "a cold cache",
        ),
        fix=_MORE_TOKENS + "; memory.home: host where it fits; memory.store_dir on a faster disk",
        verify=_SHARE,
    ),
    Rule(
        id="link-bound",
        part="run",
        look=waits_for("link"),
        causes=(
            "few tokens per step: each load serves little work",
            "a link that is slower than it should be",
        ),
        fix=_MORE_TOKENS + "; more memory.device_memory, so that loads run further ahead",
        verify=_SHARE,
    ),
    Rule(
        id="worker-bound",
        part="run",
        look=waits_for("workers"),
        causes=(
            "few microbatches for the number of workers: the pipeline fills and drains in every step",
            "units that cannot be dealt out evenly",
        ),
        fix="train.tokens_per_step larger, in as many more microbatches; fewer workers where units are few",
        verify="busy_s of the compute lanes in heartbeat.jsonl; timeline.json",
    ),
    Rule(
        id="checkpoint-bound",
        part="run",
        look=compute_rules.checkpoint_bound,
        causes=("a slow disk or network below train.run_dir", "checkpoints that are due too often"),
        fix="train.save_every or train.save_minutes larger; train.run_dir on a faster disk",
        verify="waits_s in heartbeat.jsonl: checkpoint",
    ),
    Rule(
        id="microbatch-tiny",
        part="run",
        look=compute_rules.tiny_microbatch,
        causes=("train.microbatches cuts a step into very small parts", "short sequences, few of them"),
        fix="more tokens per step in as many microbatches; with one worker train.microbatches down",
        verify="mfu in heartbeat.jsonl",
    ),
    Rule(
        id="compute-slow",
        part="run",
        look=compute_rules.slow_compute,
        causes=(
            "Python in the model's forward, which computes nothing",
            "a very small model, whose kernels are short",
            "kernels that were not made for this device; other work on the same processors",
        ),
        fix="outsize train --profile 3 shows which calls take the time",
        verify="mfu in heartbeat.jsonl",
    ),
    Rule(
        id="compute-bound",
        part="run",
        look=run_rules.compute_bound,
        causes=("enough tokens per step to hide all movement",),
        fix="nothing: only a faster device, or less recomputation, would be faster",
        verify=_SHARE,
    ),
    Rule(
        id="steps-uneven",
        part="run",
        look=run_rules.uneven,
        causes=(
            "checkpoints: train.save_every",
            "other work on the machine",
            "a disk that writes back",
            "heat",
        ),
        fix="train.save_every larger where saving is the cause; a quiet machine",
        verify="seconds in heartbeat.jsonl",
    ),
    Rule(
        id="step-superlinear",
        part="run",
        look=run_rules.superlinear,
        causes=(
            "Python in the model's forward that loops over tokens",
            "longer sequences: attention grows with their square",
            "memory that no longer fits, so that more is recomputed or moved",
        ),
        fix="as many tokens per step as the run of the evidence that took the least per token",
        verify="tokens_per_s in heartbeat.jsonl of a run with that many",
    ),
    Rule(
        id="allocator-fragmented",
        part="run",
        look=run_rules.fragmented,
        causes=("microbatches of changing length", "buffers that other code takes and frees between steps"),
        fix="CUDA: PYTORCH_ALLOC_CONF=expandable_segments:True; data.pack: true, so that all microbatches are as long",
        verify="device_bytes in heartbeat.jsonl",
    ),
    Rule(
        id="memory-above-plan",
        part="run",
        look=run_rules.above_plan,
        causes=(
            "freed memory that the allocator keeps in pieces",
            "more threads, or other kernels, than was planned for",
        ),
        fix="OMP_NUM_THREADS smaller; if it grows without end, a report with this directory's heartbeat",
        verify="rss_bytes in heartbeat.jsonl",
    ),
)
