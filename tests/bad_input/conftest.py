from collections.abc import Iterator
from pathlib import Path

import pytest

from bad_input.world import World, half_written, make_model, make_tokens, process_state, run_well


@pytest.fixture(scope="session")
def good_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The model and the tokens that all tests read, and a run before anything went wrong."""
    root = tmp_path_factory.mktemp("good")
    world = World(root, make_model(root / "model"), make_tokens(root / "tokens.npy"))
    run_well(world)
    return world


@pytest.fixture
def world(tmp_path: Path, good_world: World) -> Iterator[World]:
    """A place to fail in. Afterwards a good run in the same process must end where one before ended, bit for bit."""
    world = World(tmp_path, good_world.model, good_world.tokens)
    before = process_state()
    yield world
    assert process_state() == before
    assert not half_written(tmp_path)
    run_well(world, "afterwards")
    assert world.digest("afterwards") == good_world.digest()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not here is looked up nowhere."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
