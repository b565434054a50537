"""Several ranks train one model: where they end, what each holds, and how any number of them goes on from a checkpoint.

Ranks are threads here, and a thread's model draws no random numbers.
"""

import pytest
import torch

import zoo
from outsize.errors import ConfigError
from outsize.testing.groups import ThreadWorld, in_ranks
from outsize.train import checkpoint
from outsize.train.prepare import prepare
from outsize.train.standing import Position
from outsize.train.stream import StreamedTrainer
from support import SEQ_LEN, make_batches, make_config, read_weights, save_model, saver_of

NUM_SEQUENCES, STEPS = 12, 4
# fp32 sums in another order, and AdamW, which divides by their roots.
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(zoo.build("llama"), tmp_path_factory.mktemp("model"))


def config_of(model_dir, size, batches, dtype="fp32", **sections):
    """12 microbatches of a sequence, whatever the number of ranks."""
    train = {"microbatches": NUM_SEQUENCES // size, **sections.pop("train", {})}
    optimizer = {"max_grad_norm": 0.5, **sections.pop("optimizer", {})}
    return make_config(
        model_dir, batches, model={"dtype": dtype}, train=train, optimizer=optimizer, **sections
    )


def run(size, model_dir, directory, batches, *, first=0, resume=None, **options):
    """Train on ``size`` ranks and save; returns of each rank the losses, the weights, and the bytes of its home."""
    config = config_of(model_dir, size, batches, **options)
    world = ThreadWorld(size)
    # One after the other: what transformers does to make a model without weights is not for several threads.
    ready = [prepared_of(config, directory / str(rank), world.rank(rank)) for rank in range(size)]

    def work(group):
        prepared, own_dir = ready[group.rank], directory / str(group.rank)
        with StreamedTrainer(prepared, own_dir) as trainer:
            trainer.fill()
            if resume is not None:
                checkpoint.restore(trainer, resume)
            with saver_of(
                trainer, directory, config, decide=group_decides(group), writes=group.rank == 0
            ) as saver:
                mine = [batch.share(group.rank, group.size) for batch in batches[first:]]
                losses = [outcome.loss for outcome in trainer.steps(mine, first)]
                trainer.settle()
                saver.finish(Position(len(batches), 0, 0, losses[-1]))
                held = trainer.home.statistics().num_bytes
                used = trainer.ledger.statistics()
            for tier in ("device", "host", "disk"):
                assert used[tier].high_water_bytes <= prepared.plan.total_bytes(tier) + 64 * 4096
            return losses, read_weights(trainer), held

    found = in_ranks(size, work, world=world)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def prepared_of(config, directory, group):
    return prepare(config, directory, lambda _: None, group=group)


def group_decides(group):
    """What the first rank decides, all do."""
    channel = group.channel("steps")

    def decide(due):
        told = torch.tensor([due])
        channel.broadcast(told)
        return bool(told)

    return decide


def same(one, other, tolerance=0.0):
    return all(torch.allclose(one[name], weight, rtol=0, atol=tolerance) for name, weight in other.items())


def files_of(directory):
    """What a checkpoint holds, by file, but for what a run is called."""
    step = checkpoint.find("auto", directory)
    return {path.name: path.read_bytes() for path in sorted((step / "optimizer").iterdir())}


SGD = {"name": "sgd", "lr": 0.1}


@pytest.mark.parametrize(
    ("home", "dtype", "optimizer"),
    [("host", "fp32", {}), ("disk", "bf16", {}), ("host", "bf16", SGD), ("disk", "fp32", SGD)],
)
def test_ranks_train_and_save_what_a_single_process_does(home, dtype, optimizer, model_dir, tmp_path):
    batches = make_batches("llama", STEPS, NUM_SEQUENCES)
    options = {"dtype": dtype, "memory": {"home": home}, "optimizer": optimizer}
    ((alone, weights, held),) = run(1, model_dir, tmp_path / "one", batches, **options)
    ranks = run(2, model_dir, tmp_path / "two", batches, **options)
    tolerance = TOLERANCE if dtype == "fp32" else 2e-3
    assert ranks[0][0] == pytest.approx(alone, abs=tolerance)
    assert same(ranks[0][1], weights, 1e-4 if dtype == "fp32" else 2e-3)
    assert ranks[1][0] == ranks[0][0]
    assert same(ranks[1][1], ranks[0][1])
    one, two = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert {name: len(data) for name, data in one.items() if "excepted" not in name} == {
        name: len(data) for name, data in two.items() if "excepted" not in name
    }
    assert all(mine < held for *_, mine in ranks)


def test_any_number_of_ranks_goes_on_from_a_checkpoint(model_dir, tmp_path):
    """Two that go on end as two that were never stopped, and three end close by."""
    batches = make_batches("llama", STEPS, NUM_SEQUENCES)
    options = {"dtype": "bf16"}
    through = run(2, model_dir, tmp_path / "through", batches, **options)
    run(2, model_dir, tmp_path / "half", batches[:2], train={"steps": STEPS}, **options)
    saved = checkpoint.find("auto", tmp_path / "half")
    for size in (2, 3):
        found = run(size, saved, tmp_path / f"on{size}", batches, first=2, resume=saved, **options)
        exact = size == 2
        assert all(same(weights, found[0][1]) for _, weights, _ in found)
        assert same(found[0][1], through[0][1], 0.0 if exact else 2e-3)
        assert found[0][0] == pytest.approx(through[0][0][2:], abs=0 if exact else 2e-3)
        if exact:
            assert files_of(tmp_path / "on2") == files_of(tmp_path / "through")


def test_a_step_needs_a_sequence_for_every_microbatch_of_every_rank(model_dir, tmp_path):
    config = config_of(model_dir, 1, make_batches("llama", 1, NUM_SEQUENCES))
    with pytest.raises(ConfigError, match=f"raise it to {24 * SEQ_LEN}"):
        prepared_of(config, tmp_path, ThreadWorld(2).rank(0))


def test_delta_needs_16_bit_weights_in_host_memory(model_dir, tmp_path):
    batches = make_batches("llama", 1, NUM_SEQUENCES)
    config = config_of(model_dir, 2, batches, parallel={"weights": "delta"})
    with pytest.raises(ConfigError, match="weights are fp32"):
        prepared_of(config, tmp_path, ThreadWorld(2).rank(0))


def test_several_devices_of_a_rank_are_refused(model_dir, tmp_path):
    batches = make_batches("llama", 1, NUM_SEQUENCES)
    config = config_of(model_dir, 2, batches, memory={"device": "emulated:2"})
    with pytest.raises(ConfigError, match="one device each"):
        prepared_of(config, tmp_path, ThreadWorld(2).rank(0))
