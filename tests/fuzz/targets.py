"""Everything outsize reads that others may have written, damaged, and handed to what reads it."""

import io
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from contracts.home_contract import planes_for
from fuzz.damage import JUNK, documents, holes, texts
from fuzz.guard import survives
from fuzz.run_directories import read_by_a_command, strategies
from hardware.fake_machine import CGROUP_V2, SERVER, build, probed
from outsize.checkpoint import checkpoint_state, run_checkpoint, trainer_checkpoint
from outsize.checkpoint.files.checkpoint_files import find_tensors
from outsize.checkpoint.files.checkpoint_format import read_header, read_tensor, write_file
from outsize.config.load import load_config
from outsize.data.survey import Detected
from outsize.data.token_cache import CachedTokens
from outsize.doctor.examine import examine
from outsize.doctor.run_record import Facts, read_run
from outsize.hardware.cards import parse_gpus
from outsize.hardware.from_probe import read_machine
from outsize.model.build import load_hf_config
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec, pack_unit
from outsize.model.split import split
from outsize.optim.shares import commit_record_bytes
from outsize.planner.passes.slots import validate
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.program import parse, render
from outsize.planner.program.step_layout import StepLayout
from outsize.reporting.collect import collect
from outsize.reporting.html_page import make_page, page_data
from outsize.session.run_state import checked
from outsize.storage.committed import CommittedHome, find_record
from outsize.storage.home_layout import layout_digest
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool
from outsize.storage.record import _HEADER, VERSION, CommitRecord, _digest
from outsize.training.run_dir import config_of
from tiny import SIZES, tiny_run

ROOT = Path(tempfile.mkdtemp(prefix="outsize-fuzz-"))

CONFIG = """
model: {path: model, dtype: fp32}
data: {path: data.txt, seq_len: 16, glob: "*.txt"}
train: {steps: 3, tokens_per_step: 64, microbatches: 2, seed: 3, run_dir: run, stall_floor_s: 2e2}
optimizer: {lr: 1e-3, betas: [0.9, 0.99], schedule: constant}
memory: {device: cpu, home: disk, device_memory: 64MiB, slots: null}
"""


def home(name: str) -> Path:
    """A directory of one target."""
    path = ROOT / name
    path.mkdir(exist_ok=True)
    return path


def written(path: Path, content: str | bytes) -> Path:
    """Write a file of bad input."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def as_json(good: Any) -> st.SearchStrategy[bytes]:
    """A JSON file that is nearly ``good``: as a document, or as bytes."""
    text = json.dumps(good)
    damaged = documents(good).map(lambda document: json.dumps(document).encode())
    return damaged | damaged | holes(text.encode()) | JUNK.map(lambda junk: json.dumps(junk).encode())


# --- configuration ------------------------------------------------------------------------------------------


def read_config(text: str) -> None:
    path = home("config") / "run.yaml"
    survives(path.parent, lambda: load_config(written(path, text), environ={}))


YAML_TAGS = st.sampled_from(
    [
        "model: !!python/object/apply:os.system ['true']",
        "a: &a [*a]",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "? [a, b]\n: c",
        "? {a: b}\n: c",
        "train: {steps: 1_0}",
        "train: {? [1] : 2}",
        "<<: {train: {steps: 3}}",
        "<<: 3",
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
        "train: {steps: !!int x}",
        "train: {steps: !!binary x}",
        "train: !!set {a, b}",
        "- " * 400,
        "[" * 400,
        "{" * 400,
    ]
)


# --- checkpoints --------------------------------------------------------------------------------------------


def good_safetensors() -> bytes:
    path = home("good") / "model.safetensors"
    path.unlink(missing_ok=True)
    write_file(path, {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    return path.read_bytes()


def read_safetensors(data: bytes) -> None:
    path = written(home("safetensors") / "model.safetensors", data)

    def read() -> None:
        for stored in read_header(path).values():
            assert stored.offset + stored.numel * stored.dtype.itemsize <= len(data)
            read_tensor(stored)

    survives(path.parent, read)


def with_header(header: bytes) -> bytes:
    """A file whose header is ``header``, of the right length, before the tensors of a good one."""
    good = good_safetensors()
    start = 8 + int.from_bytes(good[:8], "little")
    return len(header).to_bytes(8, "little") + header + good[start:]


def good_header() -> Any:
    good = good_safetensors()
    return json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])


def read_index(data: bytes) -> None:
    directory = home("index")
    for name in ("one.safetensors", "two.safetensors"):
        written(directory / name, good_safetensors())
    written(directory / "model.safetensors.index.json", data)
    survives(directory, lambda: find_tensors(directory))


GOOD_INDEX = {
    "metadata": {"total_size": 32},
    "weight_map": {"a": "one.safetensors", "b": "two.safetensors"},
}


def read_model_config(data: bytes) -> None:
    directory = home("hf")
    written(directory / "config.json", data)
    written(directory / "code.py", "raise SystemExit('code of the model ran')")
    survives(directory, lambda: load_hf_config(directory))


GOOD_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoConfig": "code.Config"},
    **SIZES,
}


# Once with a good one: what libraries import and make on first use is no answer to bad input.
load_hf_config(written(home("hf") / "config.json", json.dumps({"model_type": "llama", **SIZES})).parent)


# --- runs ---------------------------------------------------------------------------------------------------


GOOD_STATE = {
    "step": 2,
    "tokens": 128,
    "skipped": 0,
    "loss": 5.5,
    "updates": {"model.embed_tokens.weight": 2},
    "loss_scale": {"value": 1.0, "good": 0},
    "model": "somewhere",
    "seed": 3,
    "dtype": "fp32",
    "data": {"seq_len": 16, "pack": "stream", "tokens_per_step": 64},
}


def read_state(data: bytes) -> None:
    directory = home("state")
    written(directory / "trainer_state.json", data)
    config = tiny_run(home("run"))

    def read() -> None:
        position = checkpoint_state.position_of(directory)
        assert position.step >= 0
        assert position.skipped >= 0
        checkpoint_state.check_same_run(directory, config, "fp32")

    survives(ROOT, read)


GOOD_FILES = {
    **GOOD_STATE,
    "format": 1,
    "run": "0" * 32,
    "files": {"model.safetensors": {"num_bytes": 8, "crc32": 1}},
}


def sealed(state: Any) -> bytes:
    """The text of a state with the checksum that it needs."""
    return json.dumps(
        {**state, "crc32": checkpoint_state._crc32(state)} if isinstance(state, dict) else state
    ).encode()


def read_sealed_state(data: bytes) -> None:
    run = home("sealed")
    directory = run / "checkpoints/step-00000002"
    directory.mkdir(parents=True, exist_ok=True)
    written(run / "checkpoints/latest", "step-00000002")
    written(directory / "trainer_state.json", data)
    survives(ROOT, lambda: run_checkpoint.check_files(directory))
    survives(ROOT, lambda: checkpoint_state.known_files(run, "0" * 32))
    read_state(data)


def read_latest(data: bytes) -> None:
    run = home("latest")
    for name in ("checkpoints/step-00000002", "elsewhere", "step-00000003"):
        (run / name).mkdir(parents=True, exist_ok=True)
        written(run / name / "trainer_state.json", json.dumps(GOOD_STATE))
    written(run / "checkpoints/latest", data)

    def read() -> None:
        found = checkpoint_state.latest(run)
        assert found == run / "checkpoints/step-00000002"

    survives(run, read)


class TwoBlocks(nn.Module):
    """What a Trainer's optimizer was for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 2, device="meta") for _ in range(2))


BLOCKS = split(TwoBlocks())
GOOD_OPTIMIZER = {
    "state": {
        number: {"step": torch.tensor(2.0), "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}
        for number, shape in enumerate([(2, 3), (2, 3), (2,), (2,)])
    },
    "param_groups": [
        {"lr": 1e-3, "betas": [0.9, 0.999], "amsgrad": False, "params": params} for params in ([0, 1], [2, 3])
    ],
}
GOOD_SCHEDULER = {"last_epoch": 2, "_last_lr": [1e-3], "base_lrs": [1e-3]}
GOOD_TRAINER = {"global_step": 2, "num_input_tokens_seen": 0, "log_history": [{"loss": 5.5, "step": 1}]}


def saved(value: Any) -> bytes:
    """What torch makes of it."""
    into = io.BytesIO()
    torch.save(value, into)
    return into.getvalue()


def read_trainer_checkpoint(optimizer: bytes, scheduler: bytes, state: bytes) -> None:
    directory = home("trainer")
    written(directory / "optimizer.pt", optimizer)
    written(directory / "scheduler.pt", scheduler)
    written(directory / "trainer_state.json", state)

    def read() -> None:
        if trainer_checkpoint.find(directory) is None:
            return
        found = trainer_checkpoint.OptimizerState(directory, BLOCKS.model, BLOCKS.spec)
        trainer_checkpoint.check_files(directory)
        for tensor in (tensor for unit in BLOCKS.spec.units for tensor in unit.tensors):
            assert found.updates(tensor.name) >= 0
            for plane in ("exp_avg", "exp_avg_sq"):
                moment = found.moment(tensor.name, plane)
                assert moment is None or torch.empty(tensor.numel).copy_(moment).shape == (tensor.numel,)

    survives(ROOT, read)


SMALL = ModelSpec(dtype="fp32", units=(pack_unit(0, "u", "block", [("w", (40, 60), True, True)]),))
SLOT_BYTES = commit_record_bytes(SMALL)


def committed_home(
    path: Path, pool: IOPool, arena: Arena, record: CommitRecord | None = None
) -> CommittedHome:
    return CommittedHome(SMALL, planes_for("fp32"), path, pool, arena=arena, record=record)


def good_home() -> bytes:
    """A home of two commits."""
    path = home("good") / "home.bin"
    with Arena() as arena, IOPool(1) as pool, closing(committed_home(path, pool, arena)) as made:
        for step in (1, 2):
            source = arena.take(4 * SMALL.units[0].numel, "source").view(torch.float32).fill_(step)
            for plane in ("weights", "exp_avg", "exp_avg_sq"):
                made.write(0, plane, 0, source)
            made.commit({**GOOD_STATE, "step": step})
    return path.read_bytes()


GOOD_HOME = good_home()
NUM_GRANULES = 3 * len(range(0, SMALL.units[0].numel, PLANE_ELEMENTS))


@st.composite
def homes(draw: st.DrawFn) -> bytes:
    """A home with holes in its records; or with others in them, whose digests are right."""
    data = bytearray(GOOD_HOME)
    slot = draw(st.sampled_from([0, SLOT_BYTES]))
    packed = bytes(data[slot : slot + 1024])
    if draw(st.booleans()):
        damaged = draw(holes(packed))
        data[slot : slot + len(packed)] = damaged.ljust(len(packed), b"\0")[: len(packed)]
        return bytes(data[: draw(st.sampled_from([len(data), len(data), 4096, 24, 0]))])
    head = {"granule_elements": PLANE_ELEMENTS, "layout": layout_digest(SMALL), "state": GOOD_STATE}
    text = json.dumps(draw(documents(head) | JUNK)).encode()
    num_granules = draw(st.sampled_from([NUM_GRANULES, NUM_GRANULES, 0, 1, 2 * NUM_GRANULES]))
    body = text + draw(st.binary(min_size=9 * num_granules, max_size=9 * num_granules))
    fields = (b"OUTSIZE\0", draw(st.sampled_from([VERSION, VERSION, 0, 7])), len(text), num_granules, 3)
    made = bytearray(_HEADER.pack(*fields, 0) + body)
    made[: _HEADER.size] = _HEADER.pack(*fields, _digest(memoryview(made)))
    data[slot : slot + len(made)] = made
    return bytes(data)


def read_home(data: bytes) -> None:
    path = written(home("committed") / "home.bin", data)

    def read() -> None:
        record, wrong = find_record(path, SMALL)
        assert record is None or record.sequence > 0
        assert isinstance(wrong, str)
        if record is None:
            return
        checked(record.state, path)
        with IOPool(1) as pool, closing(committed_home(path, pool, arena, record)) as opened:
            opened.check(lambda num_bytes: arena.take(num_bytes, "borrowed"))

    with Arena() as arena:
        survives(ROOT, read)


# --- tokens -------------------------------------------------------------------------------------------------


GOOD_TOKENS = asdict(
    Detected(
        format="text",
        forced=False,
        fields=("text",),
        mask_source="everything",
        num_files=1,
        num_skipped_files=0,
        num_documents=2,
        num_empty=0,
        num_tokens=40,
        num_trained_tokens=40,
        max_token_id=7,
        example="x",
    )
)


def read_tokens(index: bytes, tokens: bytes, ends: bytes) -> None:
    entry = home("tokens")
    written(entry / "index.json", index)
    written(entry / "tokens.bin", tokens)
    written(entry / "documents.bin", ends)

    def read() -> None:
        with closing(CachedTokens(entry)) as cached:
            cached.detected.describe()
            cached.read(0, min(cached.num_tokens, 16))
            if cached.num_documents:
                (stop,) = cached.document_ends(cached.num_documents - 1, 1)
                assert 0 <= stop <= cached.num_tokens

    survives(entry, read)


TOKENS = np.arange(40, dtype="<i4").tobytes()
ENDS = np.array([11, 40], dtype="<i8").tobytes()


# --- machines and programs ----------------------------------------------------------------------------------


def read_a_machine(data: bytes) -> None:
    path = written(home("machine") / "machine.json", data)
    survives(path.parent, lambda: read_machine(path))


def good_machines() -> list[Any]:
    place = home("fake")
    found = probed(build(place, SERVER, CGROUP_V2), place)
    return [json.loads(found.to_json()), json.loads(parse_gpus("2x4090").to_json())]


LAYOUT = StepLayout(
    num_streamed=3,
    rest=None,
    num_microbatches=2,
    trainable=(True, True, True),
    weight_bytes=(4, 4, 4),
    gradient_bytes=(4, 4, 4),
    slot_bytes=(4, 4),
    accumulator_bytes=(4,),
    clip=True,
    tiles=(2, 2, 2),
    num_tile_buffers=3,
)


def read_program(text: str) -> None:
    def read() -> None:
        program = parse(text)
        assert parse(render(program)) == program
        validate(program, LAYOUT)

    survives(ROOT, read)


@st.composite
def programs(draw: st.DrawFn) -> str:
    """The program of a step with ops moved, gone, changed or doubled."""
    ops = render(build_step(LAYOUT)).split("\n")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(ops) - 1))
        how = draw(st.sampled_from(["remove", "double", "move", "digit"]))
        op = ops.pop(at)
        if how == "move":
            ops.insert(draw(st.integers(0, len(ops))), op)
        elif how == "double":
            ops[at:at] = [op, op]
        elif how == "digit":
            digit = draw(st.sampled_from("0123456789"))
            ops.insert(at, "".join(digit if c.isdigit() and draw(st.booleans()) else c for c in op))
    return draw(st.sampled_from(["\n", "; "])).join(ops)


# --- run directories ----------------------------------------------------------------------------------------

GOOD_STEP = {
    "schema": 4,
    "step": 1,
    "time": 1.7e9,
    "loss": 2.5,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens": 64,
    "seconds": 2.0,
    "busy_s": {"compute:w0": 1.0, "up:w0": 0.5},
    "stall_s": {"up:w0": 0.2},
    "idle_s": {"compute:w0": 1.0},
    "waits_s": {"compute:w0": {"weights": {"up:w0": 0.7}, "python": {"": 0.3}}},
    "tiers": {"host": {"used_bytes": 10, "high_water_bytes": 10, "budget_bytes": None}},
    "wire_bytes": {"up:w0": 100},
    "gpus": [{"index": 0, "sm_clock_hz": None, "power_w": 1.0}],
    "host": {"span_s": 2.0, "cpu_s_by_thread": {"compute:w0": 1.0}, "major_faults": 0},
    "fallbacks": {"pageable": 1},
    "mfu": 0.3,
    "data_s": 0.1,
    "peak_rss_bytes": 1000,
    "skipped_steps": 0,
}
GOOD_ABOUT = {
    "schema": 1,
    "started": 1.7e9,
    "steps": 4,
    "units": [{"index": 0, "name": "rest", "kind": "rest", "weight_bytes": 8}],
    "device": "cpu",
    "device_names": ["cpu"],
    "machine": {"cpu": {"model": {"value": "x", "status": "read", "source": "y"}}},
    "flops_per_step": 1e9,
    "peak_flops_per_s": 1e12,
    "num_parameters": 100,
    "tokens_per_microbatch": 32,
}
GOOD_PLAN = {
    "below": "host",
    "microbatches": 2,
    "round_microbatches": 2,
    "memory_bytes": {"device": {"slots": 10}, "host": {"home": 20}},
    "program": ["F 0.0@w0"],
}
GOOD_TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "compute:w0"}},
        {
            "ph": "X",
            "tid": 1,
            "name": "F 0.0@w0",
            "ts": 1.0,
            "dur": 2.0,
            "args": {"waited_us": 1.0, "waited_for": "LOAD 0@w0.0"},
        },
    ]
}


def read_a_run(steps: bytes, about: bytes, plan: bytes, trace: bytes, config: str) -> None:
    """Read a directory as `report`, `watch`, `doctor` and the end of an objective's run do."""
    path = written(home("run") / "heartbeat.jsonl", json.dumps(GOOD_STEP).encode() + b"\n" + steps + b"\n")
    for name, content in (("run.json", about), ("plan.json", plan), ("timeline.json", trace)):
        written(path.parent / name, content)
    written(path.parent / "config.yaml", config)
    survives(path.parent, lambda: make_page(page_data([collect(path.parent)])))
    survives(path.parent, lambda: examine(Facts(recorded=read_run(path.parent))))
    survives(path.parent, lambda: config_of(path.parent))


TARGETS: Mapping[str, tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = {
    "config": (read_config, (texts(CONFIG) | YAML_TAGS | YAML_TAGS.map(lambda text: CONFIG + text),)),
    "safetensors": (read_safetensors, (holes(good_safetensors()) | st.binary(max_size=64),)),
    "safetensors header": (read_safetensors, (as_json(good_header()).map(with_header),)),
    "index": (read_index, (as_json(GOOD_INDEX),)),
    "model config": (read_model_config, (as_json(GOOD_MODEL),)),
    "trainer state": (read_state, (as_json(GOOD_STATE),)),
    "sealed state": (read_sealed_state, (documents(GOOD_FILES).map(sealed),)),
    "Trainer's optimizer": (
        read_trainer_checkpoint,
        (
            documents(GOOD_OPTIMIZER).map(saved) | holes(saved(GOOD_OPTIMIZER)),
            st.just(saved(GOOD_SCHEDULER)),
            st.just(json.dumps(GOOD_TRAINER).encode()),
        ),
    ),
    "Trainer's state": (
        read_trainer_checkpoint,
        (st.just(saved(GOOD_OPTIMIZER)), documents(GOOD_SCHEDULER).map(saved), as_json(GOOD_TRAINER)),
    ),
    "latest": (
        read_latest,
        (
            holes(b"step-00000002\n")
            | st.binary(max_size=30)
            | st.sampled_from(
                [b"..", b"../elsewhere", b"../step-00000003", b"/etc", b".", b"", b"\x00", b"a" * 5000]
            ),
        ),
    ),
    "commit record": (read_home, (homes(),)),
    "token cache": (read_tokens, (as_json(GOOD_TOKENS), holes(TOKENS), holes(ENDS))),
    "token cache index": (read_tokens, (as_json(GOOD_TOKENS), st.just(TOKENS), st.just(ENDS))),
    "machine": (read_a_machine, (st.one_of([as_json(good) for good in good_machines()]),)),
    "steps of a run": (
        read_a_run,
        (as_json(GOOD_STEP), *map(st.just, (b"{}", b"{}", b"{}", CONFIG))),
    ),
    "files of a run": (
        read_a_run,
        (
            st.just(b""),
            as_json(GOOD_ABOUT),
            as_json(GOOD_PLAN),
            as_json(GOOD_TRACE),
            texts(CONFIG) | YAML_TAGS,
        ),
    ),
    "runs by commands": (partial(read_by_a_command, ROOT / "commands"), strategies()),
    "program": (read_program, (programs() | texts(render(build_step(LAYOUT))),)),
}
