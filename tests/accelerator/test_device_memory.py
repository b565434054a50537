"""What a device keeps of memory that nobody uses, and what a run says where there is none left."""

import gc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerator import late
from accelerator.caching_allocator import CachingAllocator, OutOfMemoryError
from devices import IS_MADE_UP
from outsize.accelerators import Devices
from outsize.errors import ExecutionError
from outsize.hardware.machine_spec import CUBLAS_BYTES, DEVICE_SHARE
from outsize.planner.program.program import Lane
from outsize.runtime.device.device import MARGIN_AHEAD, Accelerator, open_device
from outsize.runtime.device.driver import Streams
from outsize.runtime.forward.short_recompute import Shortcuts
from outsize.runtime.ops.activation_ops import ActivationOps
from outsize.session.session import Session
from outsize.storage.ledger import Ledger
from outsize.training.run import train
from support import make_model_dir, make_run

pytestmark = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")
MIB = 2**20


def test_memory_of_other_streams_goes_before_lanes_begin_and_after_they_end(monkeypatch: pytest.MonkeyPatch):
    """Pools are per stream: what was timed has left segments that no lane can use."""
    emptied: list[int] = []
    monkeypatch.setattr(torch.get_device_module("late"), "empty_cache", lambda: emptied.append(1))
    device = open_device(Devices.parse("late:0"))
    assert len(emptied) == 1
    device.close()
    assert len(emptied) == 2


def test_streams_are_used_again_by_the_next_engine():
    """cuBLAS keeps a workspace of tens of MiB for each stream that has ever multiplied."""
    lanes = [Lane(kind, 0) for kind in ("compute", "up", "down")]
    streams = [Streams(Devices.parse("late:0")) for _ in range(2)]
    first, second = ([each.of(lane).stream_id for lane in lanes] for each in streams)
    for each in streams:
        each.clear()
    again = Streams(Devices.parse("late:0"))
    assert [again.of(lane).stream_id for lane in lanes] in (first, second)
    again.clear()


def test_slots_that_find_no_memory_are_an_error_that_says_what_to_set():
    device = open_device(Devices.parse("late:0"), Ledger({"device": 64 * MIB}))
    late.set_limit(0, 16 * MIB)
    try:
        with pytest.raises(
            ExecutionError,
            match=r"weights: late:0 is out of memory: torch has reserved .* of a budget of 64.00 MiB; lower "
            r"memory.device_memory",
        ):
            device.allocate(32 * MIB, "weights")
    finally:
        device.close()


def test_what_is_set_ahead_has_a_share_of_the_margin_in_it_where_there_is_as_much(
    monkeypatch: pytest.MonkeyPatch,
):
    device, empty = open_device(Devices.parse("late:0")), torch.empty

    def of_little(num_bytes: int, **settings: Any) -> torch.Tensor:
        if num_bytes > 18 * MIB:
            raise torch.OutOfMemoryError
        return empty(num_bytes, **settings)

    monkeypatch.setattr(torch, "empty", of_little)
    try:
        for planned, size in ((9, 9.5), (18, 18), (19, 0)):
            block = device.set_ahead(planned * MIB, int(4.5 * MIB / MARGIN_AHEAD), Lane("compute", 0))
            assert getattr(block, "nbytes", 0) == pytest.approx(size * MIB, abs=1), planned
            del block
    finally:
        device.close()


def test_torch_reserves_no_more_than_was_free_and_all_again_behind_the_run(monkeypatch: pytest.MonkeyPatch):
    """Under WSL2 what is beyond lies in the host's RAM, and nothing says so; another model may be on the device."""
    gc.collect()  # what tests before have not closed
    shares: list[float] = []
    module = torch.get_device_module("late")
    monkeypatch.setattr(
        module, "set_per_process_memory_fraction", lambda share, _: shares.append(share), raising=False
    )
    monkeypatch.setattr(module, "mem_get_info", lambda _: (3 * MIB, 4 * MIB))
    monkeypatch.setattr(module, "memory_reserved", lambda _: MIB // 2)
    first, second, elsewhere = (open_device(Devices.parse(name)) for name in ("late:0", "late:0", "late:1"))
    second.close()
    second.close()
    assert shares == [0.875] * 3
    first.close()
    elsewhere.close()
    assert shares == [0.875] * 3 + [1.0] * 2


def test_retries_of_the_allocator_are_counted(monkeypatch: pytest.MonkeyPatch):
    assert Devices.parse("late:0,1").num_allocator_retries() == 0
    counts = {0: 2, 1: 3}
    monkeypatch.setattr(
        torch.get_device_module("late"),
        "memory_stats",
        lambda index: {"num_alloc_retries": counts[index]},
        raising=False,
    )
    assert Devices.parse("late:0,1").num_allocator_retries() == 5
    assert Devices.parse("late:1,1").num_allocator_retries() == 3
    assert Devices().num_allocator_retries() == 0


def test_a_block_that_finds_no_room_ahead_is_no_pressure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    counts = {"ahead": 4, "later": 0}
    module = torch.get_device_module("late")
    monkeypatch.setattr(
        module, "memory_stats", lambda _: {"num_alloc_retries": sum(counts.values())}, raising=False
    )
    set_ahead, fallbacks = Accelerator.set_ahead, Session.fallbacks
    counted: list[int | None] = []

    def refused(device: Accelerator, num_bytes: int, planned: int, lane: str) -> Any:
        counts["ahead"] += 1
        return set_ahead(device, num_bytes, planned, lane)

    def watched(session: Session) -> dict[str, int]:
        counted.append(fallbacks(session).get("allocator_retries"))
        counts["later"] += 1
        counted.append(fallbacks(session).get("allocator_retries"))
        return fallbacks(session)

    monkeypatch.setattr(Accelerator, "set_ahead", refused)
    monkeypatch.setattr(Session, "fallbacks", watched)
    train(make_run(tmp_path, memory={"device": "late:0", "home": "host"}, train={"steps": 2}))
    assert counts["ahead"] > 4
    assert counted[:4] == [None, 1, 1, 2]


@pytest.mark.parametrize(("free", "margin_taken"), [(20, 7), (15, 2), (12, 0), (8, 0)])
def test_what_is_set_ahead_leaves_a_part_of_the_margin_free(
    free: int, margin_taken: int, monkeypatch: pytest.MonkeyPatch
):
    """Of 10 MiB beside a margin of 10, kernels that were loaded since the budget was made have taken some."""
    device = open_device(Devices.parse("late:0"))
    monkeypatch.setattr(torch.get_device_module("late"), "mem_get_info", lambda _: (free * MIB, 64 * MIB))
    try:
        block = device.set_ahead(10 * MIB, 90 * MIB, Lane("compute", 0))
        assert getattr(block, "nbytes", 0) == pytest.approx((10 + margin_taken) * MIB, abs=1)
    finally:
        device.close()


def test_the_model_of_torchs_allocator_splits_joins_and_gives_back():
    """Figures by hand, from the rules of torch's allocator."""
    allocator = CachingAllocator(limit=64 * MIB, lag=2)
    allocator.run([(0, 1, 512, 7)])
    assert allocator.reserved == 2 * MIB  # small blocks share a segment of 2 MiB
    allocator.run([(0, 2, 512, 7), (0, 3, 4 * MIB, 7), (0, 4, 4 * MIB, 7)])
    assert allocator.reserved == 22 * MIB  # middle ones one of 20 MiB
    allocator.run([(0, 5, 11 * MIB, 8)])
    assert allocator.reserved == 34 * MIB  # another stream, and a large one has its own, of whole 2 MiB
    allocator.run([(1, 5, 0, 8), (0, 6, 11 * MIB, 7)])
    assert allocator.reserved == 34 * MIB  # 12 MiB were left of the 20
    allocator.run([(2, 6, 0, 8), (1, 6, 0, 7), (0, 7, 11 * MIB, 7)])
    assert allocator.reserved == 46 * MIB  # an event of stream 8 has not passed
    allocator.run([(1, 7, 0, 7), (0, 8, 30 * MIB, 7)])
    assert allocator.retries == 1
    assert allocator.reserved == (2 + 20 + 30) * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.run([(0, 9, 30 * MIB, 7)])


SHAPES: dict[str, dict[str, Any]] = {
    "wide": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "deep": {
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
SEQ_LEN = {"wide": 64, "deep": 128}


def notes_of(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: str = "wide",
    *,
    lora: bool = False,
    base: str = "raw",
    **memory: Any,
) -> SimpleNamespace:
    """Return what a run of three steps allocates on the device: before its lanes begin, and up to each step."""
    make_model_dir(
        directory / "model",
        intermediate_size=512,
        num_attention_heads=4,
        max_position_embeddings=128,
        **SHAPES[shape],
    )
    config = make_run(
        directory,
        model={"dtype": "bf16"},
        data={"seq_len": SEQ_LEN[shape]},
        train={
            "tokens_per_step": 1024,
            "microbatches": 2,
            "steps": 3,
            **({"method": "lora"} if lora else {}),
        },
        **({"lora": {**LORA, "base_codec": base}} if lora else {}),
        memory={"device": "late:0", "home": "host", **memory},
    )
    taken = SimpleNamespace(before=[], steps=[], planned=0)
    of_session = Session.open_engine

    def opened(session: Session, split: Any, plan: Any, *args: Any, **named: Any) -> Any:
        taken.before = late.native().take_notes(True)
        taken.planned = sum(plan.memory["device"].values()) - CUBLAS_BYTES
        return of_session(session, split, plan, *args, **named)

    monkeypatch.setattr(Session, "open_engine", opened)
    late.native().take_notes(True)
    train(config, progress=lambda _: taken.steps.append(late.native().take_notes(True)))
    late.native().take_notes(False)
    return taken


@pytest.mark.filterwarnings("ignore")
def test_recomputes_end_where_the_needs_of_backwards_end_with_attention_of_a_device_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It saves two random states that the CPU's does not, which is what the plan was tried on."""
    shortcuts: list[tuple[Shortcuts, dict[int, Any]]] = []
    of_class = Shortcuts.__init__

    def made(self: Shortcuts, needed: Any, *args: Any, **named: Any) -> None:
        of_class(self, needed, *args, **named)
        shortcuts.append((self, dict(needed)))

    monkeypatch.setattr(Shortcuts, "__init__", made)
    notes_of(tmp_path, monkeypatch, device_memory="512MiB", activations="recompute")
    assert shortcuts
    for each, needed in shortcuts:
        assert needed
        assert each._needed == needed


def retries_by_step(notes: SimpleNamespace, scale: int, lag: int) -> Sequence[int]:
    """Return how often torch's allocator would flush in each step, all tensors ``scale`` times as large."""
    allocator = CachingAllocator(lag=lag)
    allocator.run(notes.before, scale)
    allocator.empty_cache()  # `open_device` does
    allocator.limit = int(notes.planned * scale / DEVICE_SHARE)
    counts = []
    for step in notes.steps:
        allocator.run(step, scale)
        counts.append(allocator.retries - sum(counts))
    return counts


# Over shapes, kinds of activations, slots, budgets, and adapters.
AUTO = (("wide", "76MiB"), ("wide", "80MiB"), ("deep", "74MiB"))
PLANS: list[tuple[str, dict[str, Any]]] = [
    *(("wide", {"activations": each}) for each in ("keep", "offload-products")),
    ("wide", {"activations": "recompute", "slots": 3, "offload": True}),
    *(("deep", {"activations": each}) for each in ("recompute", "offload-attention")),
    *((shape, {"activations": "offload"}) for shape in SHAPES),
    *(("wide", {"activations": each, "slots": 2}) for each in ("recompute", "keep", "offload")),
    *(
        ("wide", {"activations": each, "lora": True, "resident": 0})
        for each in ("recompute", "keep", "offload")
    ),
    *(
        ("deep", {"activations": each, "lora": True, "slots": 2, "resident": 0, **base})
        for each, base in (("offload", {}), ("recompute", {}), ("recompute", {"base": "nf4"}))
    ),
    ("wide", {"activations": "offload-attention", "lora": True, "slots": 2, "resident": 0}),
    # The largest tensor of these is a tenth of the plan.
    ("wide", {"lora": True, "device_memory": "74MiB"}),
    ("wide", {"lora": True, "base": "nf4", "device_memory": "76MiB"}),
    ("deep", {"lora": True, "device_memory": "72MiB"}),
    # What auto makes of budgets between the least and what keeps all: some of everything.
    *((shape, {"device_memory": size}) for shape, size in AUTO),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("shape", "memory"), PLANS)
def test_a_plan_fits_torchs_allocator(
    shape: str, memory: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The margin of a budget is a tenth: within it nothing is flushed, and no more than it is reserved.

    As plans of 0.8 to 5 GiB, of which some have tensors of more than a tenth.
    """
    notes = notes_of(tmp_path, monkeypatch, shape, **{"device_memory": "512MiB", **memory})
    for scale, lag in ((100, 0), (100, 200), (256, 0), (256, 200)):
        assert retries_by_step(notes, scale, lag) == [0, 0, 0]


@pytest.mark.filterwarnings("ignore")
def test_what_comes_up_waits_for_no_more_than_the_op_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its memory is taken before the next op computes, behind which it would come too late."""
    waited: list[bool] = []
    of_class = ActivationOps._room

    def room(self: ActivationOps, place: Any, *args: Any) -> Any:
        waited.append(place not in self._made)
        return of_class(self, place, *args)

    monkeypatch.setattr(ActivationOps, "_room", room)
    notes_of(tmp_path, monkeypatch, "deep", device_memory="74MiB")
    assert 3 * sum(waited) < len(waited)  # the first of a step may come while what it is has not left
