"""What is measured before a run is what the run does."""

from pathlib import Path
from typing import Any

from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from support import make_run


def measured(directory: Path, **data: Any) -> Any:
    return prepare(RunSpec.of(make_run(directory, data=data), directory), lambda _: None).measured


def test_where_sequences_may_be_padded_the_mask_is_measured(tmp_path: Path):
    """Models of transformers make one only where something is padded."""
    padded, full = measured(tmp_path, pack="none"), measured(tmp_path)
    assert measured(tmp_path, pack="documents").held_bytes >= padded.held_bytes
    assert padded.held_bytes > full.held_bytes
    assert padded.needed.keys() == full.needed.keys()
    assert all(padded.needed[unit].num_saved > full.needed[unit].num_saved for unit in full.needed)
