"""The table: every rule, what it slows down, its likely causes, its fix, and how to see that it helped.

A function looks at what was recorded and says what it sees; everything that does not depend on numbers stands here. The
order of rows decides nothing: findings are ranked by gain. A row with ``limits`` may be the verdict on a run.
"""

from typing import Final

from outsize.doctor import device_rules, finding, host_rules, run_rules
from outsize.doctor.finding import TOKENS_PER_STEP, Remedy, Rule
from outsize.doctor.link_rules import LINK_RULES, PROBE_AGAIN
from outsize.doctor.run_rules import waits_for

_LENGTH = "{data.seq_len|sequences}"
_RUN_DIR = "{train.run_dir|the directory of its checkpoints}"
_STALL_SHARE = "stall_share and stall_owner in heartbeat.jsonl of the next run"
RULES: Final[tuple[Rule, ...]] = (
    *LINK_RULES,
    Rule(
        id="cgroup-memory",
        part="run",
        look=host_rules.group_limit,
        causes=("the limit of the container or of the batch job", "other processes of the same group"),
        fix=(
            "a higher limit (docker run --memory, Slurm --mem)",
            finding.smaller_host_budget,
            finding.home_on_disk,
        ),
        verify="cat /sys/fs/cgroup/memory.events: oom and max do not grow",
    ),
    Rule(
        id="pinning-limited",
        part="link",
        look=host_rules.pinned_memory,
        causes=("the default limit of the distribution or of the container", "the driver of WSL2"),
        fix=(finding.raised_pin_limits, finding.home_on_disk, "a run that plans for less host memory"),
        verify="outsize probe: a fit stands beside the link's pinned path",
    ),
    Rule(
        id="swap-active",
        part="run",
        look=host_rules.swapping,
        causes=("budgets larger than what is free", "other processes"),
        fix=(
            finding.smaller_host_budget,
            finding.home_on_disk,
            "more RAM, or fewer other processes: ps --sort=-rss aux",
        ),
        verify="cat /proc/pressure/memory: avg60 of `some` near 0",
        limits="memory: the host swaps",
    ),
    Rule(
        id="cores-taken",
        part="run",
        look=host_rules.cores_taken,
        causes=(
            "other jobs on the same processors: builds, downloads, other runs",
            "a virtual machine whose host has promised its processors to several",
        ),
        fix="stop or move what `top` shows above the run, or give the run processors of its own: cpusets, Slurm "
        "--exclusive; where a hypervisor takes them, an instance with processors of its own",
        verify="host in heartbeat.jsonl: queued_s, others_cpu_s and stolen_cpu_s near 0",
        limits="processors that other work takes",
    ),
    Rule(
        id="cpu-quota",
        part="run",
        look=host_rules.quota,
        causes=("a container with a processor quota: libraries count the processors that they see",),
        fix=(
            "a larger quota (docker run --cpus, Kubernetes limits.cpu, Slurm --cpus-per-task)",
            finding.fewer_threads,
        ),
        verify="nr_throttled in /sys/fs/cgroup/cpu.stat stands still",
        limits="the quota of processor time",
    ),
    Rule(
        id="native-missing",
        part="host",
        look=host_rules.kernels,
        causes=("outsize was installed where there is no C compiler", "OUTSIZE_NATIVE=0 in the environment"),
        fix=(finding.native_kernels,),
        verify="outsize probe: the row `C kernels` names an instruction set",
    ),
    Rule(
        id="cpu-clock-limited",
        part="host",
        look=host_rules.clock_limit,
        causes=("a power-saving governor", "a limit set by the administrator, or a laptop on battery"),
        fix="cpupower frequency-set --governor performance (needs root)",
        verify=PROBE_AGAIN,
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
        verify="uptime, then " + PROBE_AGAIN,
    ),
    Rule(
        id="disk-unsuitable",
        part="disk",
        look=host_rules.poor_disk,
        causes=("the directory lies on a network, overlay or memory file system", "an old drive"),
        fix="{memory.store_dir}: a directory on a local NVMe with ext4 or XFS",
        verify="outsize probe --directory DIR",
    ),
    Rule(
        id="disk-sags",
        part="disk",
        look=host_rules.sagging_disk,
        causes=("the drive's fast cache is full", "heat", "a virtual disk that has used up its credit"),
        fix="{memory.store_dir} on a drive made for writes; {memory.home}: host where it fits; fewer, larger steps",
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
        verify=PROBE_AGAIN,
    ),
    Rule(
        id="loader-bound",
        part="run",
        look=waits_for("data"),
        causes=(
            "a slow {disk or network under data.path|DataLoader, or one without workers}",
            "tokenising or decompressing while training",
        ),
        fix=(
            finding.more_loaders,
            "{data.path: tokens made beforehand, on a local disk|batches made beforehand, in workers of the "
            "DataLoader; rarer saves and evaluations}",
        ),
        verify="data_s in heartbeat.jsonl",
        limits="the data loader",
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
        fix=(
            finding.fewer_microbatches,
            f"{_LENGTH} or {TOKENS_PER_STEP} larger, in as many microbatches, until memory is the limit",
        ),
        verify="stall_s.dispatch in heartbeat.jsonl",
        limits="Python on the host",
    ),
    Rule(
        id="optimizer-bound",
        part="run",
        look=waits_for("host"),
        causes=(
            "few tokens per step: each step pays the whole optimizer",
            "slow host memory, or few cores",
            "Muon's products on the host: with ns_on=device of the optimizer a GPU multiplies",
        ),
        fix=(finding.more_tokens,),
        verify=_STALL_SHARE,
        limits="the optimizer on the host",
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
        fix=(finding.more_tokens, finding.home_in_host_memory, finding.faster_store),
        verify=_STALL_SHARE,
        limits="the disk",
    ),
    Rule(
        id="link-bound",
        part="run",
        look=waits_for("link"),
        causes=(
            "few tokens per step: each load serves little work",
            "a link that is slower than it should be",
        ),
        fix=(finding.lossless_weights, finding.more_tokens, finding.more_device_memory),
        verify=_STALL_SHARE,
        limits="the link between host and device",
    ),
    Rule(
        id="worker-bound",
        part="run",
        look=waits_for("workers"),
        causes=(
            "few microbatches for the number of workers: the pipeline fills and drains in every step",
            "units that cannot be dealt out evenly",
        ),
        fix=(f"{TOKENS_PER_STEP} larger, in as many more microbatches", finding.fewer_workers),
        verify="busy_s of the compute lanes in heartbeat.jsonl; timeline.json",
        limits="other workers",
    ),
    Rule(
        id="rank-bound",
        part="run",
        look=waits_for("ranks"),
        causes=(
            "a network that is slower than compute",
            "a rank that is slower than the others, or several that share processors",
            "few tokens per step: each step exchanges all gradients and weights",
        ),
        fix=(finding.more_tokens, finding.compressed_exchange, "a faster network between the ranks"),
        verify="busy_s of the lanes net:reduce and net:gather in heartbeat.jsonl",
        limits="other ranks",
    ),
    Rule(
        id="checkpoint-bound",
        part="run",
        look=waits_for("checkpoint"),
        causes=(f"a slow disk or network below {_RUN_DIR}", "checkpoints that are due too often"),
        fix=(finding.rarer_checkpoints, f"{_RUN_DIR} on a faster disk"),
        verify="waits_s in heartbeat.jsonl: checkpoint",
        limits="checkpoints",
    ),
    Rule(
        id="microbatch-tiny",
        part="compute",
        look=device_rules.tiny_microbatch,
        causes=("{train.microbatches} cuts a step into very small parts", "short sequences, few of them"),
        fix=(
            finding.fewer_microbatches,
            "more tokens per step ({train.tokens_per_step, data.seq_len|longer sequences, a larger batch}) "
            "in as many microbatches",
        ),
        verify="mfu in heartbeat.jsonl",
        limits="tiny microbatches",
    ),
    Rule(
        id="compute-slow",
        part="compute",
        look=device_rules.slow_compute,
        causes=(
            "Python in the model's forward, which computes nothing",
            "a very small model, whose kernels are short",
            "kernels that were not made for this device; other work on the same processors",
        ),
        fix="{outsize train --profile 3|torch.profiler around a step} shows which calls take the time",
        verify="mfu in heartbeat.jsonl",
        limits="slow compute",
    ),
    Rule(
        id="compute-slowed",
        part="run",
        look=device_rules.slowed_compute,
        causes=(
            "on a CPU, lanes that copy, sum and step on the processors that compute",
            "memory that is given back and taken again: pages handed out",
            "a device that becomes slower when it is warm",
        ),
        fix="where pages are many, a larger {memory.device_memory}: memory that steps free is then kept; where other "
        "lanes take the processors, a home in host memory, or weights that cross as they are",
        verify="slowed_s, and cpu_s_by_thread and minor_faults of host, in heartbeat.jsonl",
    ),
    Rule(
        id="dtype-slow",
        part="compute",
        look=device_rules.slow_dtype,
        causes=("the processor has no products of this dtype, and converts to fp32 and back",),
        fix=(
            Remedy(
                "{model.dtype: fp32, with twice the bytes of each weight; --dtype fp32 --dry-run says what fits|"
                "a model loaded in torch.float32}",
                "model.dtype=fp32",
                is_same_training=False,
            ),
        ),
        verify="peak_flops_per_s and fp32_flops_per_s in run.json",
        limits="products in a dtype that the processor is slow at",
    ),
    Rule(
        id="compute-bound",
        part="run",
        look=run_rules.compute_bound,
        causes=("enough tokens per step to hide all movement",),
        fix=("nothing: only a faster device would be faster", finding.less_recomputation),
        verify=_STALL_SHARE,
        limits="compute",
    ),
    Rule(
        id="steps-uneven",
        part="run",
        look=run_rules.uneven,
        causes=(
            "checkpoints: {train.save_every|your trainer's save_steps}",
            "other work on the machine",
            "a disk that writes back",
            "heat",
        ),
        fix=(finding.rarer_checkpoints, "a machine on which nothing else begins and ends meanwhile"),
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
        fix="CUDA: PYTORCH_ALLOC_CONF=expandable_segments:True",
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
        fix=(
            finding.smaller_pools,
            "memory (rss_bytes) that grows without end is a fault of outsize: report it with heartbeat.jsonl",
        ),
        verify="rss_bytes in heartbeat.jsonl",
    ),
)
