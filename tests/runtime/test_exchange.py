"""Several ranks, each with an engine of its own: a step of all is the step of one process with the whole batch."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from contracts.group_contract import in_ranks
from outsize.codecs.transport import Wire
from outsize.errors import NonFiniteError
from outsize.model.split import split
from outsize.optim.shares import shares
from outsize.planner.memory import step_bytes
from runtime.engines import contexts, engine_over, train
from runtime.oddities import Sparse

STEPS, MICROBATCHES, VOCABULARY = 3, 4, 64
# fp32 sums in another order: a norm of some units, and three steps of AdamW, which divides by it.
TOLERANCE = 2e-5


def model():
    """Made by one thread: ranks that are threads share the generator of random numbers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def batches(rows=2, length=8):
    generator = torch.Generator().manual_seed(1)

    def one(microbatch):
        ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + microbatch] = -100  # so that microbatches weigh differently
        return {"input_ids": ids, "labels": labels}

    return [[one(m) for m in range(MICROBATCHES)] for _ in range(STEPS)]


def share_of(context, rank, size):
    """The context of one rank: its run of the microbatches of all."""
    count = len(context.microbatches) // size
    mine = context.microbatches[rank * count : (rank + 1) * count]
    return replace(context, microbatches=mine, first_microbatch=rank * count)


def run_rank(group, trained, directory, data, wire=None, **options):
    directory = directory / str(group.rank)
    directory.mkdir(parents=True)
    losses, norms, handle = [], [], None
    with engine_over(
        trained,
        directory,
        microbatches=len(data[0]) // group.size,
        group=group,
        wire=wire or Wire(),
        **options,
    ) as rig:
        for context in contexts(data):
            mine = share_of(context, group.rank, group.size)
            handle = rig.engine.begin(mine)
            rig.engine.forward_backward_done(handle)
            losses.append(mine.loss())
            norms.append(mine.gradient_norm)
        rig.engine.finish(handle)
        weights = {name: weight.clone() for name, weight in rig.weights().items()}
        return losses, norms, weights, rig.engine.moved(), rig.home.num_bytes


def run_ranks(size, *arguments, **options):
    models = [model() for _ in range(size)]
    found = in_ranks(size, lambda group: run_rank(group, models[group.rank], *arguments, **options))
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("device", ["cpu", "emulated:1"])
def test_ranks_end_where_a_single_process_ends_and_all_with_the_same_bits(size, home, device, tmp_path):
    alone = train(model(), batches(), tmp_path, max_grad_norm=0.5)
    found = run_ranks(size, tmp_path / "ranks", batches(), max_grad_norm=0.5, home=home, device=device)
    (losses, norms, weights, *_), *others = found
    assert losses == pytest.approx(alone.losses, abs=TOLERANCE)
    assert norms == pytest.approx(alone.norms, rel=TOLERANCE)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(weights[name], weight, atol=TOLERANCE, rtol=0)
    for other_losses, other_norms, other_weights, *_ in others:
        assert (other_losses, other_norms) == (losses, norms)
        assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())


def test_the_same_number_of_ranks_gives_the_same_bits(tmp_path):
    once, again = (
        run_ranks(3, tmp_path / name, [b[:3] for b in batches()], max_grad_norm=0.5)[0] for name in ("a", "b")
    )
    assert once[:2] == again[:2]
    assert all(torch.equal(again[2][name], weight) for name, weight in once[2].items())


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("wire", [Wire(), Wire(gradients="int8")], ids=["raw", "coded"])
def test_what_is_exchanged_in_many_chunks_is_what_is_exchanged_in_one(wire, home, tmp_path, monkeypatch):
    """Shares of 2 to 6 chunks; groups of codecs end within chunks, so that they say the same."""
    options = {"max_grad_norm": 0.5, "dtype": "bf16", "home": home}
    if home == "disk":
        options["dtype"] = "fp32"
    whole = run_ranks(2, tmp_path / "one", batches(), wire, **options)
    monkeypatch.setattr(step_bytes, "CHUNK_ELEMENTS", 2048)
    cut = run_ranks(2, tmp_path / "many", batches(), wire, **options)
    for one, many in zip(whole, cut, strict=True):
        assert one[:2] == many[:2]
        assert all(torch.equal(many[2][name], weight) for name, weight in one[2].items())


@pytest.mark.parametrize(
    ("gradients", "ratio", "error"),
    [("bf16", 2, 2e-4), ("int8", 3.5, 2e-3), ("int8-stochastic", 3.5, 4e-3), ("int4-stochastic", 7, 4e-2)],
)
def test_gradients_in_fewer_bits_change_little_and_all_ranks_alike(gradients, ratio, error, tmp_path):
    exact, coded = (
        run_ranks(2, tmp_path / name, batches(), Wire(gradients=name), max_grad_norm=0.5)
        for name in ("fp32", gradients)
    )
    (losses, norms, weights, moved, _), other = coded
    assert losses == pytest.approx(exact[0][0], abs=error)
    assert norms != exact[0][1]
    assert (other[0], other[1]) == (losses, norms)
    assert all(torch.equal(other[2][name], weight) for name, weight in weights.items())
    assert moved["net:reduce"].logical >= ratio * moved["net:reduce"].wire
    assert exact[0][3]["net:reduce"].logical == exact[0][3]["net:reduce"].wire == moved["net:reduce"].logical


@pytest.mark.parametrize(
    ("round_size", "wire", "how"),
    [
        (1, Wire(), {}),
        (3, Wire(gradients="int8"), {}),
        (3, Wire(), {"home": "disk", "dtype": "fp32"}),
        (1, Wire(gradients="int8-stochastic"), {"home": "disk", "dtype": "fp32", "device": "emulated:1"}),
    ],
    ids=["raw", "coded", "disk", "staged"],
)
def test_ranks_that_take_rounds_end_with_the_bits_of_those_that_take_none(round_size, wire, how, tmp_path):
    """Each sums its own rounds at home, and what is exchanged is what one round of all would have been."""
    data, options = [step * 2 for step in batches()], {"max_grad_norm": 0.5, "dtype": "bf16", **how}
    once = run_ranks(2, tmp_path / "one", data, wire, **options)
    rounds = run_ranks(2, tmp_path / "rounds", data, wire, round_microbatches=round_size, **options)
    for one, other in zip(once, rounds, strict=True):
        assert other[:2] == one[:2]
        assert all(torch.equal(other[2][name], weight) for name, weight in one[2].items())
        assert other[3]["net:reduce"] == one[3]["net:reduce"]


def test_each_rank_holds_all_weights_and_its_share_of_everything_else(tmp_path):
    spec = split(model()).spec
    total = sum(unit.numel for unit in spec.units)
    found = run_ranks(2, tmp_path, batches(), max_grad_norm=1.0)
    own = [sum(len(ranges[rank]) for ranges in shares(spec, 2)) for rank in range(2)]
    assert sum(own) == total
    assert [held for *_, held in found] == [4 * total + 3 * 4 * mine for mine in own]


def ids_of(*tokens):
    """A microbatch of these token ids."""
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("home", ["host", "disk"])
def test_an_expert_that_one_rank_asks_for_is_stepped_on_all_and_others_are_left_alone(home, tmp_path):
    data = [[ids_of(1, 2), ids_of(2, 3)], [ids_of(1, 1), ids_of(1, 2)], [ids_of(4, 5), ids_of(5, 5)]]
    torch.manual_seed(0)
    models = [Sparse() for _ in range(3)]
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
    alone = train(models[2], data, tmp_path, max_grad_norm=0.5)
    found = in_ranks(
        2,
        lambda group: run_rank(
            group, models[group.rank], tmp_path / "ranks", data, max_grad_norm=0.5, home=home
        ),
    )
    for losses, norms, weights, *_ in found:
        assert losses == pytest.approx(alone.losses, abs=TOLERANCE)
        assert norms == pytest.approx(alone.norms, rel=TOLERANCE)
        for name, weight in alone.weights.items():
            torch.testing.assert_close(weights[name], weight, atol=TOLERANCE, rtol=0)
    assert all(torch.equal(found[0][2][name], weight) for name, weight in found[1][2].items())


def test_what_is_not_finite_on_one_rank_ends_the_step_on_all(tmp_path):
    models = [model() for _ in range(2)]
    with torch.no_grad():
        models[1].lm_head.weight[0, 0] = float("nan")
    found = in_ranks(
        2, lambda group: run_rank(group, models[group.rank], tmp_path, batches(), max_grad_norm=0.5)
    )
    for error in found:
        assert isinstance(error, NonFiniteError)
        assert "step 1: loss nan" in str(error)
