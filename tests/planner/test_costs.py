from dataclasses import replace

import pytest

from outsize.codecs.codec_spec import codec_spec
from outsize.codecs.transport import CodecRates, Transport
from outsize.errors import ConfigError
from outsize.hardware.cards import parse_gpus
from outsize.hardware.machine_spec import Figure, Peer
from outsize.model.sizes.model_spec import ModelSpec, PartKind, pack_part, pack_unit
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.step_bytes import load_bytes
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.program import parse_op
from outsize.planner.program.stages import Choice, Extent, Stages
from outsize.planner.simulate.costs import DECODE_KERNELS, EXCHANGE_S, LAUNCH_S, UnitTimes, cost_model
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.simulator import simulate
from planner.layouts import make_layout

UNITS = tuple(pack_unit(i, f"u{i}", "block", [("w", (1 << 20,), True, True)]) for i in range(4))
MODEL = ModelSpec(units=UNITS, dtype="bf16")
SIZE = 1 << 20
LAYOUT = make_layout(
    4,
    weight_bytes=(2 * SIZE,) * 4,
    gradient_bytes=(4 * SIZE,) * 4,
    slot_bytes=(2 * SIZE,) * 2,
    accumulator_bytes=(4 * SIZE,),
    offload=frozenset({1, 2}),
)
TIMES = UnitTimes(forward_s=(0.1,) * 4, backward_s=(0.3,) * 4)
MACHINE = parse_gpus("4090")
LOSSLESS = Transport(weights="lossless4")


def price(text, machine=MACHINE, **changes):
    return cost_model(machine, MODEL, LAYOUT, TIMES, (0, 7, 7, 7), **changes).cost_of(parse_op(text))


def test_products_of_muon_on_a_device_are_in_the_step_on_the_link_and_beside_the_forwards():
    """Six products of a square matrix in two iterations; the same STEP with them on the host, but for copies."""
    shapes = [("w", (1024, 1024), True, True)]
    square = replace(MODEL, units=tuple(pack_unit(i, "u", "block", shapes) for i in range(4)))
    host = StateLayout(dtype="bf16", newton_schulz=2)

    def costs(state):
        return cost_model(MACHINE, square, LAYOUT, TIMES, (0, 7, 7, 7), state=state)

    there, flops = costs(replace(host, products_on_device=True)), 2 * 6 * 1024**3
    step, link = there.cost_of(parse_op("STEP 2")), MACHINE.links[0].latency_s.value
    first, up, down = step.parts
    device_s = flops / (MACHINE.gpus[0].products.value)
    assert (first.seconds, first.through) == (0.0, ("optimizer", "host memory"))
    assert (up.amount, up.through) == (down.amount, ("up:w0", "host memory")) == (2 * SIZE, up.through)
    assert up.seconds == pytest.approx(device_s + link)
    assert (down.seconds, down.through) == (link, ("down:w0", "host memory"))
    here = costs(host).cost_of(parse_op("STEP 2"))
    assert here.seconds == pytest.approx(flops / MACHINE.host.products.value)
    assert first.amount == here.amount + 6 * SIZE  # rounded to bf16
    beside_s = there.cost_of(parse_op("F 2.0@w0")).seconds - 0.1
    assert beside_s * LAYOUT.num_microbatches == pytest.approx(device_s)
    assert costs(host).cost_of(parse_op("F 2.0@w0")).seconds == 0.1


@pytest.mark.parametrize(
    ("dtypes", "rate"), [(("bf16", "fp32"), 2e12), (("fp16", "fp32"), 1e12), (("fp32",), 1e12)]
)
def test_products_in_bf16_take_what_models_reach_and_where_there_are_none_the_least(dtypes, rate):
    peaks = {"fp32": 2e12, "bf16": 4e12, "fp16": 8e12}
    half = Figure(value=0.5, source="test")
    gpu = replace(
        MACHINE.gpus[0],
        peak_flops_per_s={dtype: Figure(value=peaks[dtype], source="sheet") for dtype in dtypes},
        efficiency=half,
    )
    assert (gpu.products.value, gpu.products.source) == (rate, "sheet; test")
    assert replace(gpu, products_per_s=half).products == half


def test_compute_takes_the_times_given_and_copies_go_over_the_link_and_through_memory():
    assert price("F 2.0@w0") == Cost(seconds=0.1)
    assert price("B 2.0@w0") == price("FB 3.0@w0") == Cost(seconds=0.3)
    latency = MACHINE.links[0].latency_s.value
    assert price("LOAD 2@w0.1") == Cost(seconds=latency, amount=2 * SIZE, through=("up:w0", "host memory"))
    assert price("GRAD 2@w0") == Cost(seconds=latency, amount=4 * SIZE, through=("down:w0", "host memory"))
    assert price("SAVE 2.0@w0") == Cost(seconds=latency, amount=7, through=("down:w0", "host memory"))
    assert price("STEP 2") == Cost(amount=30 * SIZE, through=("optimizer", "host memory"))
    assert price("FREE 2@w0.1") == Cost()


@pytest.mark.parametrize(
    ("state", "num_bytes"),
    [
        ({"masters": "split"}, 28),
        ({"masters": "split", "moments": "int8"}, 16.0625 / 0.78),
        ({"masters": "split24", "moments": "int8"}, 14.0625 / 0.78 / 0.87),
        ({"masters": "split", "num_moments": 1}, 20),
        ({"num_moments": 0}, 14 / 0.25),
        ({"num_moments": 0, "state_of": (("state.sum", None),)}, 22 / 0.25),
        # Whole parameters: several passes over fp32, and a scratch for what lies otherwise.
        ({"num_moments": 0, "temporaries": 3}, 70 / 0.25),
        ({"masters": "split", "num_moments": 0, "temporaries": 3}, 84 / 0.25),
        ({"masters": "split", "gradients": "bf16", "num_moments": 0, "temporaries": 3}, 90 / 0.25),
    ],
)
def test_a_step_is_priced_by_what_its_state_takes(state, num_bytes):
    found = price("STEP 2", state=StateLayout(dtype="bf16", **state))
    assert found == Cost(amount=round(num_bytes * SIZE), through=("optimizer", "host memory"))


def test_what_is_kept_is_priced_by_its_bytes_and_by_what_it_spares():
    choices = (Choice.OFFLOAD_PRODUCTS, Choice.KEEP_ATTENTION, Choice.KEEP)
    kept = tuple((choice,) for choice in (Choice.RECOMPUTE, *choices[:2], Choice.RECOMPUTE))
    sizes = {Extent.ATTENTION: (0, 5, 5, 0), Extent.PRODUCTS: (0, 70, 70, 0)}
    spared = {Extent.ATTENTION: (0.02,) * 4, Extent.PRODUCTS: (0.08,) * 4}
    times = replace(TIMES, recompute_s=(0.1, 0.09, 0.09, 0.1), spared_s=spared)
    layout = replace(LAYOUT, kept=kept)
    costs = cost_model(MACHINE, MODEL, layout, times, (0, 7, 7, 7), kept_bytes=sizes)
    cost_of = {text: costs.cost_of(parse_op(text)) for text in ("B 0.0@w0", "B 1.0@w0", "B 2.0@w0")}
    assert [cost.seconds for cost in cost_of.values()] == pytest.approx([0.3, 0.22, 0.28])
    assert costs.cost_of(parse_op("FP 1.0@w0")) == costs.cost_of(parse_op("F 0.0@w0")) == Cost(seconds=0.1)
    latency = MACHINE.links[0].latency_s.value
    for text, way in (("OFFLOAD 1.0@w0", "down:w0"), ("ONLOAD 1.0@w0", "up:w0")):
        assert costs.cost_of(parse_op(text)) == Cost(seconds=latency, amount=70, through=(way, "host memory"))
    assert times.spared(Choice.KEEP, 1) == 0.09


def test_decoding_adds_its_last_piece_and_what_it_takes_longer_than_the_link():
    """Pieces are 32 at once, of a unit of 64; the encoding of a gradient, or of raw weights, has nothing to decode."""
    unit = pack_unit(0, "u", "block", [("w", (64 * SIZE,), True, True)])
    model = ModelSpec(units=(unit,) * 4, dtype="bf16")
    link, latency = MACHINE.links[0].up_bytes_per_s.value, MACHINE.links[0].latency_s.value
    sent = load_bytes(LOSSLESS, unit, "bf16")

    def seconds(decode_bytes_per_s, text="LOAD 2@w0.1", transport=LOSSLESS):
        rates = CodecRates(encode_bytes_per_s=1e9, decode_bytes_per_s=decode_bytes_per_s)
        costs = cost_model(
            MACHINE, model, LAYOUT, TIMES, (0, 7, 7, 7), transport=transport, codec_rates=rates
        )
        return costs.cost_of(parse_op(text)).seconds - latency

    assert seconds(1e12) == pytest.approx(128 * SIZE / 1e12 / 2)
    slow_s = 128 * SIZE / 1e9
    assert seconds(1e9) == pytest.approx((slow_s - sent / link) / 2 + slow_s / 2)
    assert seconds(1e9, "GRAD 2@w0") == pytest.approx(0.0)
    assert seconds(1e9, transport=Transport()) == pytest.approx(0.0)
    assert seconds(1e9, "STEP 2") + latency == pytest.approx(128 * SIZE / 1e9)


def test_lanes_encode_and_decode_what_goes_down_and_comes_back():
    """A gradient is encoded and decoded by the lane that brings it home, an input once on each of its ways."""
    transport = Transport(gradients="lossless4", activations="lossless4")
    rates = CodecRates(encode_bytes_per_s=1e3, decode_bytes_per_s=1e4)
    both = {"gradients": rates, "activations": rates}
    sizes, latency = (0, 700, 700, 700), MACHINE.links[0].latency_s.value

    def seconds(text, transport=transport, rates=both):
        costs = cost_model(MACHINE, MODEL, LAYOUT, TIMES, sizes, transport=transport, crossing_rates=rates)
        return costs.cost_of(parse_op(text)).seconds - latency

    gradient = LAYOUT.gradient_bytes[2]
    assert seconds("GRAD 2@w0") == pytest.approx(gradient / 1e3 + gradient / 1e4)
    assert seconds("SAVE 1.0@w0") == pytest.approx(0.7)
    assert seconds("FETCH 1.0@w0") == pytest.approx(0.07)
    for text in ("SEND 1.0@w0", "RECV 1.0@w0", "LOAD 2@w0.1"):
        assert seconds(text) == pytest.approx(0.0)
    assert seconds("SAVE 1.0@w0", Transport()) == seconds("GRAD 2@w0", rates={}) == pytest.approx(0.0)


def test_copies_between_gpus_go_over_their_own_wire_or_the_links_of_both():
    figure = Figure(value=1e11, source="test")
    link = replace(MACHINE.links[0], switch="plx")
    machine = replace(
        parse_gpus("3x4090"),
        links=(link, link, MACHINE.links[0]),
        uplinks={"plx": figure},
        peers=(
            Peer(source=0, target=1, bytes_per_s=figure, own_wire=True),
            Peer(source=1, target=0, bytes_per_s=figure, own_wire=False),
            Peer(source=1, target=2, bytes_per_s=figure, own_wire=False),
        ),
    )
    sizes = (0, 700, 700, 700)
    costs = cost_model(machine, MODEL, LAYOUT, TIMES, sizes)

    def through(text):
        cost = costs.cost_of(parse_op(text))
        assert cost.amount == 700
        return cost.through

    assert through("PASS 1.0@w0>w1.0") == ("peer:w0-w1",)
    assert through("RETURN 1.0@w1>w0.0") == ("peer:w1-w0", "down:w1", "up:w0")
    assert through("PASS 1.0@w1>w2.0") == ("peer:w1-w2", "down:w1", "up:w2", "uplink:plx:down")
    with pytest.raises(ConfigError, match="no copies go from GPU 2 to GPU 0"):
        costs.cost_of(parse_op("PASS 1.0@w2>w0.0"))


def test_a_copy_behind_a_switch_shares_its_uplink():
    links = tuple(replace(link, switch="plx") for link in MACHINE.links)
    machine = replace(MACHINE, links=links, uplinks={"plx": Figure(value=1e9, source="test")})
    assert "uplink:plx:up" in price("LOAD 2@w0.1", machine).through


def test_tiles_go_through_the_disk_the_last_one_cut_short():
    options = {"home": "disk", "below": "host", "tile_elements": SIZE * 3 // 4}
    assert price("READ 1#0>t0", **options).amount == 16 * SIZE * 3 // 4
    assert price("WRITE 1#1<t0", **options) == Cost(
        amount=14 * SIZE / 4, through=("disk write", "host memory")
    )


def test_a_recompute_of_its_own_leaves_the_backward_the_rest():
    layout = replace(
        LAYOUT,
        offload=frozenset(),
        num_workers=1,
        stages=Stages(forward=((0, 3),), backward=((3, 4), (0, 3)), round_size=1),
    )
    of = cost_model(MACHINE, MODEL, layout, TIMES, (0, 7, 7, 7)).cost_of
    apart = of(parse_op("R 1.0@w0")).seconds + of(parse_op("B 1.0@w0")).seconds
    assert apart == pytest.approx(0.3)
    assert of(parse_op("FB 3.0@w0")).seconds == 0.3
    assert of(parse_op("SUM 1@w0.0")).amount == 4 * SIZE
    assert of(parse_op("RECV 1.0@w0")).through == ("up:w0", "host memory")


def test_a_backward_that_was_timed_shorter_than_its_forward_takes_no_time_at_least():
    layout = replace(
        LAYOUT,
        offload=frozenset(),
        num_workers=1,
        stages=Stages(forward=((0, 3),), backward=((3, 4), (0, 3)), round_size=1),
    )
    times = replace(TIMES, backward_s=tuple(forward / 2 for forward in TIMES.forward_s))
    of = cost_model(MACHINE, MODEL, layout, times, (0, 7, 7, 7)).cost_of
    assert of(parse_op("B 1.0@w0")).seconds == 0.0


def test_a_tier_that_is_not_there():
    with pytest.raises(ConfigError, match="no disk"):
        price("STEP 0", replace(MACHINE, disk=None), home="disk")


def test_a_compute_bound_step_takes_what_its_compute_takes():
    costs = cost_model(MACHINE, MODEL, LAYOUT, TIMES, (0, 7, 7, 7))
    done = simulate([build_step(LAYOUT)] * 4, LAYOUT, costs)
    compute = 3 * 0.1 + 4 * 0.3
    assert compute <= done.step_s < compute * 1.01


def test_weights_that_step_are_encoded_once_when_all_of_them_have_changed():
    """Frozen parts never are; a unit in tiles is behind the last one, one that nodes share when it is whole again."""
    frozen = pack_part(PartKind(plane="frozen_bf16", dtype="bf16"), [("base", (8 * SIZE,))])
    unit = pack_unit(0, "u", "block", [("w", (4 * SIZE,), True, True)], (frozen,))
    model = ModelSpec(units=(unit,) * 4, dtype="bf16")
    rates = CodecRates(encode_bytes_per_s=1e9, decode_bytes_per_s=1e12)

    def seconds(text, layout=LAYOUT):
        changes = {"transport": LOSSLESS, "codec_rates": rates, "tile_elements": SIZE}
        costs = cost_model(MACHINE, model, layout, TIMES, (0, 7, 7, 7), **changes)
        return costs.cost_of(parse_op(text)).seconds

    encode_s = 4 * SIZE * 2 / 1e9
    assert seconds("STEP 2") == seconds("STEP 2#3@t0") == pytest.approx(encode_s)
    assert seconds("STEP 2#0@t0") == seconds("STEP 2#2@t0") == 0.0
    nodes = replace(LAYOUT, num_nodes=2, own_elements=(2 * SIZE,) * 4, num_host_buffers=1)
    assert seconds("STEP 2", nodes) == 0.0
    assert seconds("GATHER 2", nodes) == pytest.approx(encode_s + EXCHANGE_S)


def test_a_load_is_priced_with_what_decoding_frozen_parts_takes_on_the_device():
    """Bytes that kernels move in the device's own memory, and launches; nothing of parts that stay, or lie as is."""
    numel = 3 * 2**24
    kind = PartKind(plane="nf4", dtype="bf16", codec="nf4", encoded_bytes=lambda numel: 4096)
    plain = PartKind(plane="plain", dtype="bf16")

    def load(kind, layout=LAYOUT, machine=MACHINE):
        part = pack_part(kind, [("big", (numel,))])
        model = replace(MODEL, units=tuple(replace(unit, frozen=(part,)) for unit in UNITS))
        return cost_model(machine, model, layout, TIMES, (0, 7, 7, 7)).cost_of(parse_op("LOAD 2@w0.0"))

    gpu, latency = MACHINE.gpus[0], MACHINE.links[0].latency_s.value
    by_memory = numel * codec_spec("nf4").device_decode_bytes / gpu.memory_bytes_per_s.value
    decoding_s = max(by_memory, numel / 280e9)  # what an H200 did, and no memory is too slow for
    assert load(kind).seconds == pytest.approx(latency + decoding_s + DECODE_KERNELS * LAUNCH_S)
    assert load(plain).seconds == latency
    assert load(kind, replace(LAYOUT, stays=frozenset({2}))).seconds == latency
    host = replace(MACHINE, gpus=(replace(gpu, is_host=True),))
    assert load(kind, machine=host).seconds == latency
    slow = replace(gpu, peak_flops_per_s={"fp32": Figure(value=8.1e12, source="T4")})
    decoding_s = numel / 280e9 * 66.9 / 8.1
    decoded = load(kind, machine=replace(MACHINE, gpus=(slow,)))
    assert decoded.seconds == pytest.approx(latency + decoding_s + DECODE_KERNELS * LAUNCH_S)
