"""Which settings have no effect and which lose bits, told once a run knows its machine, its model and its data."""

import contextlib
from pathlib import Path

from outsize.config import Config, Surroundings
from outsize.data.reading.corpus_files import find_sources
from outsize.errors import DataError
from outsize.hardware.cpu import read_cpu
from outsize.model.build import is_masked
from outsize.session.job.prepare import Job


def notes_of(config: Config, prepared: Job, num_processes: int = 1) -> list[str]:
    """Return a line for every setting of ``config``, as the user gave it, without effect on the run that it came to.

    And one of what of the optimizer's state is kept in fewer bits than a plain fp32 run has.
    """
    container = None
    with contextlib.suppress(DataError):  # which says so itself where it is opened
        container = find_sources(Path(config.data.path), config.data.glob).container
    around = Surroundings(
        num_processes=num_processes,
        num_numa_nodes=len(read_cpu(Path("/")).numa_nodes) or None,
        device=str(prepared.machine.devices),
        home=prepared.machine.home,
        dtype=prepared.dtype,
        chunks_loss=prepared.chunk_tokens is not None,
        container=container,
        one_file=Path(config.data.path).is_file(),
        masks=is_masked(prepared.hf_config),
    )
    lossy = prepared.plan.state.lossy
    rounded = [f"not bit-exact, since rounded by chance: {' and '.join(lossy)}"] if lossy else []
    return [f"note: {note}" for note in (*config.notes(around), *rounded)]
