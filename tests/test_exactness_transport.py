"""Lossless codecs on the link change no bit of a run; others change what they say, and nothing else."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

import zoo
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.sizes.model_spec import UnitSpec
from outsize.planner.program.program import Kind
from outsize.runtime.ops.link_codecs import EncodedWeights, GradientCarrier
from outsize.session.decide.decide import choose_plan
from outsize.session.job.prepare import prepare
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from support import make_batches, make_config, run_streamed, save_model
from test_exactness import compare

EXACT = {"weights": "lossless4", "gradients": "lossless4", "activations": "lossless3"}


def on(device: str = "emulated", **memory: Any) -> dict[str, Any]:
    return {"device": device, **memory}


@pytest.mark.parametrize(
    ("dtype", "codec"), [("fp32", "lossless4"), ("bf16", "lossless3"), ("fp16", "lossless4")]
)
def test_lossless_is_exact_in_every_dtype(dtype: str, codec: str, tmp_path: Path):
    transport = {"weights": codec, "gradients": codec, "activations": codec}
    model, memory = {"dtype": dtype}, on(offload=True)
    got = compare(
        "llama", tmp_path, model=model, memory=memory, train={"microbatches": 2}, transport=transport
    )
    assert got.plan.transport.exact


@pytest.mark.parametrize(("name", "slots"), [("qwen3_moe", 2), ("gpt2", 4), ("llama_tied", 3)])
def test_lossless_is_exact_for_families(name: str, slots: int, tmp_path: Path):
    optimizer, memory = {"max_grad_norm": 0.05}, on(slots=slots, offload=True)
    compare(name, tmp_path, memory=memory, optimizer=optimizer, train={"microbatches": 3}, transport=EXACT)


def test_frozen_weights_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And those that train, once before the first step and after each."""
    encoded: list[int] = []
    encode = EncodedWeights._encode

    def count(self: EncodedWeights, unit: int, *rest: Any) -> None:
        encoded.append(unit)
        encode(self, unit, *rest)

    monkeypatch.setattr(EncodedWeights, "_encode", count)
    freeze = ("*embed_tokens*", "*layers.0.*")
    compare("llama", tmp_path, model={"freeze": freeze}, memory=on(), transport={"weights": "lossless3"})
    assert [encoded.count(unit) for unit in range(4)] == [0, 0, 4, 4]  # of those beside their home


def test_weights_beyond_the_host_budget_run_packed_from_ram(tmp_path: Path):
    """Frozen weights that fit host memory only encoded: bit-equal to a run that had room, and no disk."""
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 5, "vocab_size": 264}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    save_model(AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads)), tmp_path / "model")
    batches = make_batches("llama")
    model = {"dtype": "bf16", "freeze": ("*embed_tokens*", "*layers.*")}
    transport = {"weights": "lossless3"}
    roomy = make_config(tmp_path / "model", batches, model=model, memory=on())
    want, prepared = run_streamed(roomy, batches, tmp_path / "roomy")
    packed = prepare(
        RunSpec.of(
            make_config(tmp_path / "model", batches, model=model, memory=on(), transport=transport),
            tmp_path / "packed",
        ),
        print,
    )
    budget = packed.plan.total_bytes("host")
    assert budget < 0.9 * prepared.plan.total_bytes("host")
    tight = {"host_memory": str(budget + 2**16)}
    with pytest.raises(InfeasiblePlanError, match="home"):
        prepare(
            RunSpec.of(
                make_config(tmp_path / "model", batches, model=model, memory=on(**tight)), tmp_path / "raw"
            ),
            print,
        )
    config = make_config(tmp_path / "model", batches, model=model, memory=on(**tight), transport=transport)
    got, _ = run_streamed(config, batches, tmp_path / "run")
    # Where that is left to the run it rests in RAM so, too; as it is, it fits there no more than on disk.
    for named in ("auto", "lossless3"):
        chosen = make_config(
            tmp_path / "model",
            batches,
            model=model,
            memory=on(home="auto", **tight),
            transport={"weights": named},
        )
        found = prepare(RunSpec.of(chosen, tmp_path / named), print)
        codecs = ("lossless4", "lossless3") if named == "auto" else (named,)
        assert found.machine.home == "host"
        assert found.plan.transport.weights in codecs
        assert choose_plan(found, print)[0] == found
    raw = make_config(tmp_path / "model", batches, model=model, memory=on(home="auto", **tight))
    with pytest.raises(InfeasiblePlanError):
        prepare(RunSpec.of(raw, tmp_path / "disk"), print)
    assert got.losses == want.losses
    assert got.weights.keys() == want.weights.keys()
    assert all(got.weights[name].equal(want.weights[name]) for name in want.weights)


def test_lossless_is_exact_for_several_workers(tmp_path: Path):
    compare("llama", tmp_path, memory=on("emulated:2"), train={"microbatches": 4}, transport=EXACT)


def test_several_workers_hand_inputs_over_encoded_and_their_gradients_as_they_are(tmp_path: Path):
    """Wire bytes are those of the plan; losses repeat, and are near those of an exact run."""
    memory, found, moved = on("emulated:2"), [], []
    for run, transport in enumerate(({"activations": "int8"}, {"activations": "int8"}, {})):
        directory = tmp_path / str(run)
        save_model(zoo.build("llama"), directory / "model")
        batches = make_batches("llama", num_steps=1)
        train = {"microbatches": 4, "loss": "model"}
        config = make_config(directory / "model", batches, memory=memory, train=train, transport=transport)
        prepared = prepare(RunSpec.of(config, directory), print)
        with StreamedTrainer(prepared, directory) as trainer:
            trainer.fill()
            found.append([outcome.loss for outcome in trainer.steps(batches)])
            trainer.settle()
            moved.append(trainer.engine.moved())
        downs = [each for lane, each in moved[-1].items() if lane.startswith("down")]
        assert sum(each.wire for each in downs) == pytest.approx(prepared.plan.traffic.down, rel=0.01)
    assert found[0] == found[1] != found[2]
    assert found[0] == pytest.approx(found[2], rel=0.01)
    assert sum(each.wire for each in moved[0].values()) < sum(each.wire for each in moved[2].values())
    assert sum(each.logical for each in moved[0].values()) == sum(each.wire for each in moved[2].values())


def test_a_gradient_that_stages_share_goes_encoded_when_it_is_whole(tmp_path: Path, monkeypatch):
    """That of tied embeddings comes home, goes up again, and comes home whole: once encoded, and once as it is."""
    sent: list[int] = []
    bring_home = GradientCarrier.bring_home

    def note(self: GradientCarrier, unit: UnitSpec, *rest: Any) -> int:
        sent.append(unit.index)
        return bring_home(self, unit, *rest)

    monkeypatch.setattr(GradientCarrier, "bring_home", note)
    memory, transport = on("emulated:2"), {"gradients": "lossless4"}
    got = compare("llama_tied", tmp_path, memory=memory, train={"microbatches": 4}, transport=transport)
    program = got.plan.program
    trips = Counter(op.unit for op in program if op.kind is Kind.GRAD)
    assert max(trips.values()) > 1
    assert Counter(sent) == dict.fromkeys(trips, len(got.losses))


def test_gradients_of_a_disk_home_go_encoded_too(tmp_path: Path):
    compare("llama", tmp_path, memory=on(home="disk"), transport={"gradients": "lossless4"})


@pytest.mark.parametrize(
    ("transport", "near"),
    [
        ({"activations": "int8"}, 0.01),
        ({"gradients": "int8-stochastic"}, 0.02),
        ({"gradients": "int4-stochastic"}, 0.05),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_lossy_ones_stay_near_and_repeat(transport: dict[str, str], near: float, tmp_path: Path):
    """Twice the same run is the same run, and its losses are near those of an exact one."""
    losses = [
        losses_of(tmp_path / str(run), transport=chosen)
        for run, chosen in enumerate((transport, transport, {}))
    ]
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] == pytest.approx(losses[2], rel=near)


def losses_of(directory: Path, **sections: Any) -> list[float]:
    save_model(zoo.build("llama"), directory / "model")
    batches = make_batches("llama", num_steps=6)
    train = {"microbatches": 2}
    config = make_config(
        directory / "model", batches, memory=on(offload=True), train={"loss": "model", **train}, **sections
    )
    return run_streamed(config, batches, directory / "run")[0].losses


def test_wire_and_logical_bytes_are_counted_apart(tmp_path: Path):
    save_model(zoo.build("llama"), tmp_path / "model")
    batches = make_batches("llama", num_steps=1)
    transport = {"weights": "lossless4", "gradients": "int8", "activations": "int8"}
    wanted = {"memory": on(offload=True), "model": {"dtype": "bf16"}}
    config = make_config(tmp_path / "model", batches, transport=transport, **wanted)
    raw = prepare(RunSpec.of(make_config(tmp_path / "model", batches, **wanted), tmp_path / "raw"), print)
    prepared = prepare(RunSpec.of(config, tmp_path / "run"), print)
    with StreamedTrainer(prepared, tmp_path / "run") as trainer:
        trainer.fill()
        list(trainer.steps(batches))
        trainer.settle()
        moved = trainer.engine.moved()
    wire = {lane: each.wire for lane, each in moved.items()}
    logical = {lane: each.logical for lane, each in moved.items()}
    assert (logical["up:w0"], logical["down:w0"]) == (raw.plan.traffic.up, raw.plan.traffic.down)
    assert wire["up:w0"] < logical["up:w0"]
    assert wire["down:w0"] < logical["down:w0"] / 3
    assert wire["down:w0"] == prepared.plan.traffic.down
    assert wire["up:w0"] == pytest.approx(prepared.plan.traffic.up, rel=0.2)  # of planes so small
    assert prepared.plan.memory["device"]["codecs"] > 0
    assert prepared.plan.memory["host"]["encoded weights"] > 0


@pytest.mark.parametrize(
    ("memory", "transport", "message"),
    [
        ({"device": "cpu"}, {"weights": "lossless4"}, "over no link"),
        (on(home="disk"), {"weights": "lossless4"}, "set memory.home=host"),
    ],
)
def test_what_has_no_such_link_is_refused(
    memory: dict[str, Any], transport: dict[str, str], message: str, tmp_path: Path
):
    save_model(zoo.build("llama"), tmp_path / "model")
    config = make_config(tmp_path / "model", make_batches("llama"), memory=memory, transport=transport)
    with pytest.raises(ConfigError, match=message):
        prepare(RunSpec.of(config, tmp_path / "run"), print)


def test_codecs_are_part_of_the_budget(tmp_path: Path):
    save_model(zoo.build("llama"), tmp_path / "model")
    memory, batches = on(device_memory="6MiB"), make_batches("llama")
    prepare(RunSpec.of(make_config(tmp_path / "model", batches, memory=memory), tmp_path / "run"), print)
    config = make_config(tmp_path / "model", batches, memory=memory, transport={"weights": "lossless4"})
    with pytest.raises(InfeasiblePlanError, match="for codecs"):
        prepare(RunSpec.of(config, tmp_path / "run"), print)
