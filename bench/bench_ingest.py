"""How near does text ingest come to the tokenizer alone?

The same text, the source of Python's own library as JSON lines, becomes stored tokens by the engine (`open_data`:
read, parse, encode, write, index), and tokens of nobody by the tokenizer alone, which is handed the same documents
ready in memory, in batches of the same size: by its ordinary call, and by the one that does not follow offsets. The
better of the two is what ingest is held against. Ways take turns within a round, in an order that turns round from
round to round, so that what else the machine does meets all of them; the ratio is the median of the rounds' own. The
tokenizer is a byte-level BPE that is trained here, since none is downloaded; all ways use the library's own threads.

    python bench/bench_ingest.py                                     # about 4 minutes on two cores
"""

import argparse
import json
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import Spread, Usage, finish, machine, print_table
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from outsize.data.encode import batches
from outsize.data.opening import open_data
from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader

CLAIM = "37.5 M tokens/s through ingest, tokenise, feed and writeback"
COUNTED = "float32 numbers of dummy matrices, made in memory: no text was read and none tokenised"


def make_corpus(directory: Path, num_bytes: int) -> Path:
    path, written = directory / "corpus.jsonl", 0
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            for source in sources:
                text = source.read_text(encoding="utf-8", errors="ignore")
                written += file.write(json.dumps({"text": text}) + "\n")
                if written >= num_bytes:
                    break
    return path


def make_tokenizer(corpus: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    backend = ByteLevelBPETokenizer()
    with corpus.open(encoding="utf-8") as lines:
        texts = (json.loads(line)["text"] for _, line in zip(range(200), lines, strict=False))
        backend.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size-mib", type=int, default=48, help="text")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-ingest-", dir=arguments.dir) as scratch:
        directory = Path(scratch)
        corpus = make_corpus(directory, arguments.size_mib * 2**20)
        tokenizer = make_tokenizer(corpus, arguments.vocabulary)
        documents = [
            [document.text for document in batch]
            for batch in batches(
                DocumentReader(find_sources(corpus, None), None, Corpus(path=corpus)).documents()
            )
        ]

        def alone(encode: Callable[..., Any]) -> int:
            return sum(
                len(encoding.ids)
                for texts in documents
                for encoding in encode(texts, add_special_tokens=False)
            )

        def ingest() -> int:
            cache = directory / "cache"
            with open_data(corpus, tokenizer, seq_len=2048, cache_dir=cache) as dataset:
                num_tokens = dataset.detected.num_tokens
            shutil.rmtree(cache)
            return num_tokens

        backend = tokenizer.backend_tokenizer
        ways: dict[str, Callable[[], int]] = {
            "tokenizer alone": partial(alone, backend.encode_batch),
            "without offsets": partial(alone, backend.encode_batch_fast),
            "ingest": ingest,
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        cores: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(arguments.rounds + 1):
            for name in list(ways)[:: 1 if index % 2 else -1]:
                before, started = Usage.now(), time.perf_counter()
                num_tokens = ways[name]()
                seconds = time.perf_counter() - started
                if index > 0:
                    rates[name].append(num_tokens / seconds)
                    cores[name].append((Usage.now() - before).cpu_s / seconds)
    best = max(list(ways)[:2], key=lambda name: Spread.of(rates[name]).median)
    ratios = Spread.of(ours / theirs for ours, theirs in zip(rates["ingest"], rates[best], strict=True))
    rows = [
        [name, f"{Spread.of(rates[name]).median / 1e6:.3f}", f"{Spread.of(rates[name]).relative:.0%}", cost]
        for name in ways
        for cost in [Spread.of(cores[name]).median]
    ]
    print_table(["way", "M tokens/s", "spread", "cores"], rows, title=f"{arguments.size_mib} MiB of text")
    print(f"\ningest reaches {ratios} of the better of the two, {best} (target: at least 0.9)")
    print(f"VELOCITY claims {CLAIM}; it counted {COUNTED}")
    finish(
        {
            "benchmark": "ingest",
            "machine": machine(),
            "size_mib": arguments.size_mib,
            "tokens_per_s": {name: Spread.of(values).median for name, values in rates.items()},
            "ratio_to": best,
            "ratio": ratios.median,
            "ratio_low": ratios.low,
            "ratio_high": ratios.high,
            "claim": CLAIM,
            "counted": COUNTED,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
