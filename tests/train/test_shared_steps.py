"""Several ranks train one model: where they end, what each holds, and how any number of them goes on from a checkpoint.

Ranks are threads here, and a thread's model draws no random numbers.
"""

import pytest
import torch

import zoo
from contracts.group_contract import ThreadWorld, in_ranks
from outsize.checkpoint import run_checkpoint
from outsize.errors import ConfigError
from outsize.planner.memory import step_bytes
from outsize.session.job.prepare import prepare
from outsize.session.run_state import Position
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from support import SEQ_LEN, make_batches, make_config, read_weights, save_model, saver_of

NUM_SEQUENCES, STEPS = 6, 3
# fp32 sums in another order, and AdamW, which divides by their roots.
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(zoo.build("llama"), tmp_path_factory.mktemp("model"))


def config_of(model_dir, size, batches, dtype="fp32", **sections):
    """Six microbatches of a sequence, whatever the number of ranks."""
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
                trainer.position = run_checkpoint.restore(trainer, resume)
            with saver_of(
                trainer, directory, config, decide=group_decides(group), writes=group.rank == 0
            ) as saver:
                mine = [batch.share(group.rank, group.size) for batch in batches[first:]]
                losses = [outcome.loss for outcome in trainer.steps(mine, first)]
                trainer.settle()
                saver.finish(Position(len(batches), 0, 0))
                held = trainer.home.num_bytes
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
    return prepare(RunSpec.of(config, directory, group), lambda _: None)


def group_decides(group):
    """What the first rank decides, all do."""
    channel = group.channel("steps")

    return lambda due: channel.gather_objects(due)[0]


def same(one, other, tolerance=0.0):
    return all(torch.allclose(one[name], weight, rtol=0, atol=tolerance) for name, weight in other.items())


def files_of(directory):
    """What a checkpoint holds, by file, but for what a run is called."""
    step = run_checkpoint.find("auto", directory)
    return {path.name: path.read_bytes() for path in sorted((step / "optimizer").iterdir())}


def sizes_of(directory):
    """The same, in bytes; how many masters are kept whole is anyone's."""
    return {name: len(data) for name, data in files_of(directory).items() if "excepted" not in name}


PLAIN, SPLIT, INT8, SGD = {}, {"masters": "split"}, {"state": "int8"}, {"name": "sgd", "lr": 0.1}
FIVE_BYTES = {"masters": "split24", "state": "int8"}
# Fewer bits of state are rounded by chance, and a sum in another order may fall to the other side.
STATES = [
    ("host", "fp32", PLAIN, TOLERANCE, 1e-4),
    ("disk", "bf16", PLAIN, 2e-3, 2e-3),
    ("host", "bf16", SPLIT, 2e-3, 2e-3),
    ("disk", "bf16", INT8, 1e-2, 5e-3),
    ("host", "bf16", FIVE_BYTES, 1e-2, 5e-3),
    ("host", "bf16", SGD, 2e-3, 2e-3),
    ("disk", "fp32", SGD, TOLERANCE, 1e-4),
]


@pytest.mark.parametrize(("home", "dtype", "optimizer", "of_losses", "of_weights"), STATES)
def test_ranks_train_and_save_what_a_single_process_does(
    home, dtype, optimizer, of_losses, of_weights, model_dir, tmp_path
):
    batches = make_batches("llama", STEPS, NUM_SEQUENCES)
    options = {"dtype": dtype, "memory": {"home": home}, "optimizer": optimizer}
    ((alone, weights, held),) = run(1, model_dir, tmp_path / "one", batches, **options)
    ranks = run(2, model_dir, tmp_path / "two", batches, **options)
    assert ranks[0][0] == pytest.approx(alone, abs=of_losses)
    assert same(ranks[0][1], weights, of_weights)
    assert ranks[1][0] == ranks[0][0]
    assert same(ranks[1][1], ranks[0][1])
    assert sizes_of(tmp_path / "one") == sizes_of(tmp_path / "two")
    assert all(mine < held for *_, mine in ranks)


@pytest.mark.parametrize("optimizer", [PLAIN, INT8], ids=str)
def test_two_that_go_on_end_as_two_that_were_never_stopped_and_three_close_by(optimizer, model_dir, tmp_path):
    batches = make_batches("llama", STEPS, NUM_SEQUENCES)
    options = {"dtype": "bf16", "optimizer": optimizer}
    through = run(2, model_dir, tmp_path / "through", batches, **options)
    run(2, model_dir, tmp_path / "half", batches[:1], train={"steps": STEPS}, **options)
    saved = run_checkpoint.find("auto", tmp_path / "half")
    found = run(2, saved, tmp_path / "on", batches, first=1, resume=saved, **options)
    assert all(same(weights, through[0][1]) for _, weights, _ in found)
    assert found[0][0] == through[0][0][1:]
    assert files_of(tmp_path / "on") == files_of(tmp_path / "through")
    if optimizer is PLAIN:
        found = run(3, saved, tmp_path / "three", batches, first=1, resume=saved, **options)
        assert same(found[0][1], through[0][1], 2e-3)
        assert found[0][0] == pytest.approx(through[0][0][1:], abs=2e-3)


@pytest.mark.parametrize(
    ("home", "optimizer"), [("host", SPLIT), ("disk", SPLIT), ("disk", INT8), ("disk", FIVE_BYTES)], ids=str
)
def test_any_number_of_ranks_takes_a_checkpoint_over_to_the_bit(
    home, optimizer, model_dir, tmp_path, monkeypatch
):
    """What three ranks, or one, take from two, and save before they train, is what they were given."""
    if home == "host":
        monkeypatch.setattr(step_bytes, "STORE_ELEMENTS", 2048)  # so that shares go to a checkpoint in pieces
    batches = make_batches("llama", 1, NUM_SEQUENCES)
    options = {"dtype": "bf16", "optimizer": optimizer, "memory": {"home": home}}
    run(2, model_dir, tmp_path / "two", batches, **options)
    saved = run_checkpoint.find("auto", tmp_path / "two")
    for size in (1, 3):
        run(size, saved, tmp_path / f"on{size}", batches, first=1, resume=saved, **options)
        assert files_of(tmp_path / f"on{size}") == files_of(tmp_path / "two")


def test_gradients_of_ranks_wait_in_fp32(model_dir, tmp_path):
    config = config_of(model_dir, 2, make_batches("llama", 1, NUM_SEQUENCES), optimizer={"gradients": "bf16"})
    with pytest.raises(ConfigError, match="ranks sum gradients at home, in fp32"):
        prepared_of(config, tmp_path, ThreadWorld(2).rank(0))


def test_a_step_needs_a_sequence_for_every_microbatch_of_every_rank(model_dir, tmp_path):
    config = config_of(model_dir, 1, make_batches("llama", 1, NUM_SEQUENCES))
    with pytest.raises(ConfigError, match=f"raise it to {12 * SEQ_LEN}"):
        prepared_of(config, tmp_path, ThreadWorld(2).rank(0))


def test_several_devices_of_a_rank_are_refused(model_dir, tmp_path):
    batches = make_batches("llama", 1, NUM_SEQUENCES)
    config = config_of(model_dir, 2, batches, memory={"device": "emulated:2"})
    with pytest.raises(ConfigError, match="one device each"):
        prepared_of(config, tmp_path, ThreadWorld(2).rank(0))
