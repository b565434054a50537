"""Measure disks and the reading of data.

How fast text becomes tokens and stored tokens become batches, by the number of threads.

What every codec makes of tensors of the user's own: ratio, error, and rates of one core.

Direct reads and writes of a directory's disk by queue depth, through the engine's own file and pool.
"""

import os
import statistics
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize.codecs.codec import CodecFigures, measure_file
from outsize.data.opening import ModelLimits, open_data
from outsize.errors import OutsizeError, StorageError
from outsize.hardware.cgroup import Fact, Measurement, explain
from outsize.hardware.machine_file import DataRates, DepthRates, DiskRates, ProbedCodec
from outsize.probing.effort import Effort
from outsize.storage.directory import temporary_directory
from outsize.storage.disk_file import DEFAULT_REQUEST_BYTES, DirectFile
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool

_PIECE_CHARS = 20_000
# Tokens of a sequence and sequences of a batch.
_SEQ_LEN, _NUM_SEQUENCES = 2048, 32
_VOCABULARY = 8192
_TRAINING_CHARS = 200_000


def measure_data(effort: Effort, tokenizer: Path | None = None, *, num_cpus: int) -> DataRates:
    """Return the rates of a tokenizer and of the engine's loader, with 1, 2, 4, ... threads up to the processors.

    Args:
        effort: how much text, how many tokens.
        tokenizer: a ``tokenizer.json`` or a directory that has one; None makes one from the source of Python's own
            library: byte-level BPE, which is how most models' tokenizers work.
        num_cpus: processors that this process may use.
    """
    # 1, 2, 4, ... and the number of processors itself.
    counts = sorted({1 << power for power in range(max(1, num_cpus).bit_length())} | {max(1, num_cpus)})
    pieces = _pieces(effort.data_chars)
    loader = {str(count): _loader(effort, count) for count in counts}
    try:
        backend, name = _open_tokenizer(tokenizer)
    except Exception as error:  # the tokenizers library raises Exception itself
        absent = Measurement.absent(explain(error))
        return DataRates(
            tokenizer=Fact.absent(explain(error)),
            tokenizer_tokens_per_s={str(count): absent for count in counts},
            loader_tokens_per_s=loader,
        )
    with _one_thread_each():
        rates = {str(count): _tokenized(backend, pieces, count, effort) for count in counts}
    return DataRates(tokenizer=name, tokenizer_tokens_per_s=rates, loader_tokens_per_s=loader)


def _tokenized(backend: Any, pieces: Sequence[str], num_threads: int, effort: Effort) -> Measurement:
    """Return tokens per second with ``num_threads`` threads, each of which encodes all pieces."""

    def work(_: int) -> int:
        # As ingest does where nothing is masked: without the offsets that only a mask needs.
        return sum(
            len(encoded.ids) for encoded in backend.encode_batch_fast(pieces, add_special_tokens=False)
        )

    rates = _rates_of(work, num_threads, effort)
    return Measurement.of(rates, f"{sum(map(len, pieces))} characters on each of {num_threads} threads")


def _loader(effort: Effort, num_threads: int) -> Measurement:
    """Return tokens per second of batches from an array of tokens on disk, shared out to ``num_threads`` threads."""
    try:
        with temporary_directory() as directory:
            path = directory / "tokens.npy"
            np.save(path, np.arange(effort.loader_tokens, dtype=np.int32) % _VOCABULARY)
            with open_data(
                path, None, seq_len=_SEQ_LEN, cache_dir=directory, limits=ModelLimits(vocab_size=_VOCABULARY)
            ) as dataset:
                num_batches = max(1, effort.loader_tokens // _SEQ_LEN // _NUM_SEQUENCES)

                def work(first: int) -> int:
                    steps = range(first, max(num_batches, num_threads), num_threads)
                    return sum(dataset.batch(step, _NUM_SEQUENCES).input_ids.numel() for step in steps)

                rates = _rates_of(work, num_threads, effort)
    except (OSError, OutsizeError) as error:
        return Measurement.absent(explain(error))
    how = f"batches of {_NUM_SEQUENCES} x {_SEQ_LEN} on {num_threads} threads, the file in the page cache"
    return Measurement.of(rates, how)


def _rates_of(work: Callable[[int], int], num_threads: int, effort: Effort) -> list[float]:
    """Return tokens per second of ``work``, which is told the number of its thread and returns its tokens."""
    rates = []
    with ThreadPoolExecutor(num_threads, "probe-data") as threads:
        for index in range(effort.num_samples_min + 1):
            started = time.perf_counter()
            num_tokens = sum(threads.map(work, range(num_threads)))
            seconds = time.perf_counter() - started
            if index > 0:
                rates.append(num_tokens / seconds)
    return rates


def _open_tokenizer(path: Path | None) -> tuple[Any, Fact]:
    import tokenizers

    if path is not None:
        file = path / "tokenizer.json" if path.is_dir() else path
        return tokenizers.Tokenizer.from_file(str(file)), Fact.read(str(file), "--tokenizer")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(_pieces(_TRAINING_CHARS), trainer)
    name = f"byte-level BPE of {backend.get_vocab_size()} tokens"
    return backend, Fact(value=name, status="assumed", source="made here; name yours with --tokenizer")


def _pieces(num_chars: int) -> list[str]:
    """Return about ``num_chars`` characters of the source of Python's own library, in pieces."""
    text = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= num_chars:
            break
        text += file.read_text(encoding="utf-8", errors="replace")
    text = text[:num_chars] or "a library without its source " * (num_chars // 30 + 1)
    return [text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS)]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep the tokenizers library from using threads of its own: here each thread is one that is counted."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def measure_codecs(tensors: Path | None) -> tuple[ProbedCodec, ...]:
    """Return the figures of every codec on a safetensors file; none without one.

    Raises:
        CodecError: not a safetensors file, or nothing in it that codecs are for.
    """
    return () if tensors is None else tuple(_rates(figures, tensors) for figures in measure_file(tensors))


def _rates(figures: CodecFigures, tensors: Path) -> ProbedCodec:
    where = f"{figures.numel} elements of {tensors}"
    return ProbedCodec(
        kind=figures.kind,
        codec=figures.codec,
        dtype=figures.dtype,
        num_elements=figures.numel,
        ratio=Fact.read(figures.ratio, where),
        bound=Fact.read(figures.bound, where),
        largest_error=Fact.read(figures.largest_error, where),
        relative_error=Fact.read(figures.relative_error, where),
        encode_bytes_per_s=Measurement.of([figures.encode_bytes_per_s], f"{where}, seconds of one core"),
        decode_bytes_per_s=Measurement.of([figures.decode_bytes_per_s], f"{where}, seconds of one core"),
    )


# Samples of the writes without a pause.
_NUM_SUSTAINED = 12


def measure_disk(directory: Path, effort: Effort) -> DiskRates:
    """Return the rates of the disk under ``directory``; where it cannot be written, why.

    The file has no name while it is used, so that nothing stays behind, however the process ends.
    """
    path = directory / f".outsize-probe-{uuid.uuid4().hex}"
    # One sample moves a whole buffer, which has room for all requests that are in flight.
    num_requests = max(1, effort.disk_buffer_bytes // DEFAULT_REQUEST_BYTES)
    sample_bytes = num_requests * DEFAULT_REQUEST_BYTES
    num_bytes = max(sample_bytes, effort.disk_bytes // sample_bytes * sample_bytes)
    queue_depths = list(dict.fromkeys(min(depth, num_requests) for depth in effort.queue_depths))
    depths: list[DepthRates] = []
    direct = Fact.absent("nothing was measured")
    sustained = Measurement.absent("a quick probe is too short for it: outsize probe --full")
    try:
        with Arena() as arena:
            buffer = arena.take(sample_bytes, "disk buffer")
            # Not zeros: a drive or a file system may leave those out.
            buffer.random_(0, 256)
            for depth in queue_depths:
                if depths and time.perf_counter() >= effort.until_s:
                    break
                with (
                    IOPool(max(1, depth - 1), name="probe-io") as pool,
                    DirectFile(path, num_bytes, pool=pool, temporary=True) as file,
                ):
                    depths.append(_measure_depth(file, buffer, depth, effort))
                    if depth == max(queue_depths) and effort.sustained_s > 0:
                        sustained = _sustained(file, buffer, effort)
                    buffered = file.is_refused
                    direct = Fact.read(not buffered, "O_DIRECT on the file system")
    except (StorageError, OSError) as error:
        why = explain(error)
        if not depths:
            direct = Fact.absent(why)
            absent = sustained = Measurement.absent(why)
            depths = [
                DepthRates(queue_depth=depth, read_bytes_per_s=absent, write_bytes_per_s=absent)
                for depth in queue_depths
            ]
    return DiskRates(
        directory=str(directory.resolve()),
        direct=direct,
        request_bytes=DEFAULT_REQUEST_BYTES,
        depths=tuple(depths),
        sustained_write_bytes_per_s=sustained,
    )


def _measure_depth(file: DirectFile, buffer: Tensor, depth: int, effort: Effort) -> DepthRates:
    how = f"{depth} x {DEFAULT_REQUEST_BYTES // 2**20} MiB in flight"
    # Blocks that were never written read as zeros without a disk, and their first write costs more than a later one.
    once = _disk_rates(file.write_from, buffer, depth, file.num_bytes, seconds=effort.disk_s, passes=1)
    region = len(once) * buffer.nbytes
    writes = _disk_rates(file.write_from, buffer, depth, region, seconds=effort.disk_s)
    reads = _disk_rates(file.read_into, buffer, depth, region, seconds=effort.disk_s)
    return DepthRates(
        queue_depth=depth,
        write_bytes_per_s=Measurement.of(writes, f"sequential writes, {how}"),
        read_bytes_per_s=Measurement.of(reads, f"sequential reads, {how}"),
    )


def _sustained(file: DirectFile, buffer: Tensor, effort: Effort) -> Measurement:
    """Write without a pause; each sample is a good part of a second, so that what drives buffer does not show."""
    rates = _disk_rates(file.write_from, buffer, 0, file.num_bytes, seconds=effort.sustained_s)
    together = max(1, len(rates) // _NUM_SUSTAINED)
    samples = [
        statistics.harmonic_mean(rates[start : start + together])
        for start in range(0, len(rates) - together + 1, together)
    ]
    seconds = len(rates) * buffer.nbytes / statistics.harmonic_mean(rates)
    how = f"{len(rates)} x {buffer.nbytes // 2**20} MiB without a pause, {seconds:.1f} s"
    return Measurement.of(samples, how)


def _disk_rates(
    move: Callable[[Tensor, int], None],
    buffer: Tensor,
    depth: int,
    region: int,
    *,
    seconds: float,
    passes: int | None = None,
) -> list[float]:
    """Return bytes per second of one buffer after the other, round and round the first ``region`` bytes of the file.

    Ends after ``seconds``, or after ``passes`` rounds; a slow disk has moved one buffer by then.
    """
    # The pool's caller works too, so one call of one request is all that is in flight at depth 1.
    pieces = torch.split(buffer, DEFAULT_REQUEST_BYTES) if depth == 1 else (buffer,)
    most = None if passes is None else passes * region // buffer.nbytes
    rates: list[float] = []
    stop = time.perf_counter() + seconds
    while not rates or (time.perf_counter() < stop and len(rates) != most):
        offset = len(rates) * buffer.nbytes % region
        started = time.perf_counter()
        for index, piece in enumerate(pieces):
            move(piece, offset + index * DEFAULT_REQUEST_BYTES)
        rates.append(buffer.nbytes / (time.perf_counter() - started))
    return rates
