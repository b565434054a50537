"""Batches of tokens: the order they come in, their tensors in memory that is used again, and masks drawn for them."""

import copy
import hashlib
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from outsize.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NUM_ROUNDS = 8


class SeededPermutation:
    """Bijection of 0..size-1 that is a pure function of (size, seed, epoch).

    A shuffled array of sequence numbers costs 8 bytes per sequence and has to be rebuilt on resume. A block cipher on
    the domain 0..size-1 costs nothing and answers any position at once. The construction is the generalised Feistel
    network with cycle walking of Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002): a balanced
    Feistel network permutes 0..4**k-1, the smallest such domain that holds ``size``; a value that falls outside
    0..size-1 is encrypted again until it falls inside. The domain is at most 4 * size, so four walks are expected at
    most. Luby and Rackoff (1988) show that four rounds suffice for a pseudo-random permutation; eight are used because
    the halves may be a few bits only. The round function is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA
    2014).
    """

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = hashlib.blake2b(f"outsize permutation {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS)
        self._keys = np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each position (int64 ``[n]``, within 0..size-1) goes, as int64 ``[n]``."""
        values = self._encrypt(positions.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Blocks that are kept: what a prefetcher has ready, the batch of the step, and the one in the making.
_NUM_FREE_MAX = 8


class RecycledArrays:
    """Hands out int64 arrays. Safe to use from several threads.

    A batch of fresh memory costs a page fault for every 4 KiB, more than reading its tokens does. So the memory of a
    batch comes back, and a run of equal batches walks round a ring of as many blocks as are alive at once:

    1. `take` hands out an array over a free block, or over a new one;
    2. the array is held by the tensor made of it, and by every view of that;
    3. when the last of them is gone, and no earlier, the block is free again.

    Nobody has to give anything back, and nobody can be handed memory that somebody still reads.
    """

    def __init__(self) -> None:
        self._free: deque[NDArray[np.int64]] = deque(maxlen=_NUM_FREE_MAX)

    def take(self, num_rows: int, num_columns: int) -> NDArray[np.int64]:
        """Return an array ``[num_rows, num_columns]``; what it holds is left over from others."""
        count = num_rows * num_columns
        try:
            block = self._free.pop()  # the one that was used last is in the cache, if any is
        except IndexError:
            block = np.empty(count, np.int64)
        if len(block) < count:
            block = np.empty(count, np.int64)
        # A view of a view has the first one as its base, so this object lives exactly as long as any of them.
        root = np.frombuffer(block.data, np.int64, count)
        weakref.finalize(root, self._free.append, block).atexit = False
        return root.reshape(num_rows, num_columns)


IGNORED = -100  # the label that torch's cross-entropy skips, and Hugging Face's convention for "not trained"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Sequences of one step, equally long, on the CPU.

    Attributes:
        input_ids: int64 ``[num_sequences, seq_len]``.
        labels: int64 ``[num_sequences, seq_len]``, `IGNORED` where a token is not trained. Not shifted: label
            ``t`` is token ``t``, and a Hugging Face model shifts inside.
        attention_mask: int64 ``[num_sequences, seq_len]``, 1 for tokens and 0 for padding; ``None`` where
            nothing is padded.
        position_ids: int64 ``[num_sequences, seq_len]``, 0 where a document begins, which tells a model to keep the
            documents of a sequence apart; ``None`` where positions go on over the whole sequence.
        whole: the batch of all ranks that this is one rank's share of; ``None`` where one process trains all of it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    whole: "Batch | None" = None

    @classmethod
    def made_of(cls, tensors: Mapping[str, Any]) -> "Batch":
        """Return the batch whose `inputs` are ``tensors``."""
        return cls(**tensors)

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self.input_ids.shape[0]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by name: the keyword arguments of a model's forward."""
        names = ("input_ids", "labels", "attention_mask", "position_ids")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @cached_property
    def num_target_tokens(self) -> int:
        """Number of tokens the loss is a mean over; the model's shift drops the first label of each row."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    def num_targets(self, shifted: bool) -> int:
        """Tokens that a model's loss is a mean over; a model that predicts the token in its place shifts nothing."""
        return self.num_target_tokens if shifted else int((self.labels != IGNORED).sum())

    def split(self, num_microbatches: int) -> list["Batch"]:
        """Cut into microbatches along the sequences, as even as possible, the larger ones first.

        Microbatches are views, not copies. Some may hold no target token; weight them by `num_target_tokens`.

        Raises:
            ConfigError: fewer sequences than microbatches.
        """
        if not 1 <= num_microbatches <= self.num_sequences:
            raise ConfigError(
                f"cannot cut {self.num_sequences} sequences into {num_microbatches} microbatches; "
                "lower the number of microbatches, or raise the tokens per step"
            )
        cut = {name: tensor.tensor_split(num_microbatches) for name, tensor in self.inputs.items()}
        return [
            Batch.made_of({name: parts[i] for name, parts in cut.items()}) for i in range(num_microbatches)
        ]

    def narrowed(self, num_columns: int) -> "Batch":
        """Return the first columns; what is cut off is padding."""
        return Batch.made_of(
            {name: tensor[:, :num_columns].contiguous() for name, tensor in self.inputs.items()}
        )

    def pinned(self) -> "Batch":
        """Return the same batch in pinned memory, from where a copy to the accelerator goes on by itself.

        torch keeps pinned memory for the next batch, and waits with that for copies that are under way.

        Raises:
            RuntimeError: the driver pins no more.
        """
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        return replace(Batch.made_of(inputs), whole=self.whole)

    def share(self, rank: int, size: int) -> "Batch":
        """Return the sequences of one of ``size`` ranks: in order, as even as possible, the larger shares first.

        Shares are views, not copies. Their losses add up to the mean over the targets of `whole`.

        Raises:
            ConfigError: fewer sequences than ranks.
        """
        if size > self.num_sequences:
            raise ConfigError(
                f"{self.num_sequences} sequences per step cannot be shared out to {size} ranks; raise "
                "train.tokens_per_step, or start fewer ranks"
            )
        return replace(self.split(size)[rank], whole=self)


class BatchPinner:
    """Pins batches, until the driver pins no more: of that it is asked once, and from then on they stay as they are."""

    def __init__(self) -> None:
        self._has_refused = False

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch in pinned memory, or as it is."""
        try:
            return batch if self._has_refused else batch.pinned()
        except RuntimeError as error:  # WSL2 pins 1 GiB or less in all
            self._has_refused = True
            reason = str(error).partition("\n")[0]
            _log.warning("batches stay pageable, copies to the GPU will be slower: %s", reason)
            return batch


class Masker:
    """Hides tokens of batches, and makes targets of the hidden ones alone. May be called from any thread.

    The drawing is that of transformers' ``DataCollatorForLanguageModeling``, a sequence at a time and from a generator
    of its own, seeded by what the sequence is: the position that a run draws it at, or its number where it is measured.
    So masks are the same whichever thread makes a batch, wherever a run is resumed, and however many ranks share a
    step.

    Args:
        tokenizer: of the model; has a mask token.
        seed: of the run.
        mlm_probability: share of the tokens that are to be predicted, special ones aside.
        mask_replace_prob: share of those that become the mask token.
        random_replace_prob: share of those that become any token; the rest stay as they are.
        vocab_size: rows of the model's embedding; None where that is not known.

    Raises:
        DataError: the tokenizer has no mask token, or tokens that the model has no rows for.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        *,
        mlm_probability: float = 0.15,
        mask_replace_prob: float = 0.8,
        random_replace_prob: float = 0.1,
        vocab_size: int | None = None,
    ) -> None:
        from transformers import DataCollatorForLanguageModeling

        if tokenizer.mask_token_id is None:
            raise DataError(
                f"the model is a masked language model, and its tokenizer ({type(tokenizer).__name__}) has no mask "
                "token; set mask_token in its tokenizer_config.json to a token that the model knows"
            )
        if vocab_size is not None and random_replace_prob and len(tokenizer) > vocab_size:
            raise DataError(
                f"tokens are replaced by any of the tokenizer's {len(tokenizer)}, and the model's embedding has "
                f"{vocab_size} rows; set data.random_replace_prob=0, or use the tokenizer of the model"
            )
        try:
            self._collator = DataCollatorForLanguageModeling(
                tokenizer,
                mlm_probability=mlm_probability,
                mask_replace_prob=mask_replace_prob,
                random_replace_prob=random_replace_prob,
            )
        except ValueError as error:
            raise ConfigError(f"data: {error}") from error
        self._seed = seed
        self._special = torch.tensor(sorted(tokenizer.all_special_ids), dtype=torch.int64)

    def describe(self) -> str:
        """Return what a command prints: how much is hidden, and how."""
        drawn = self._collator
        return (
            f"masked language model: {drawn.mlm_probability:.1%} of the tokens are to be predicted; of these "
            f"{drawn.mask_replace_prob:.1%} become {drawn.tokenizer.mask_token}, "
            f"{drawn.random_replace_prob:.1%} any token"
        )

    def __call__(self, batch: Batch, kind: str, numbers: Iterable[int]) -> Batch:
        """Return a batch with tokens hidden, and labels that are `IGNORED` but where one is to be predicted.

        Special tokens, padding, and what the data say is not trained are neither hidden nor predicted.

        Args:
            batch: as the data have it.
            kind: what the numbers count, e.g. ``"trained"``.
            numbers: of each sequence.
        """
        collator: Any = copy.copy(self._collator)
        ids, labels = batch.input_ids.clone(), batch.labels.clone()
        left_alone = torch.isin(ids, self._special) | (labels == IGNORED)
        for row, number in enumerate(numbers):
            collator.generator = torch.Generator().manual_seed(self.seed_of(kind, number))
            here = slice(row, row + 1)
            ids[here], labels[here] = collator.torch_mask_tokens(ids[here], left_alone[here])
        return replace(batch, input_ids=ids, labels=labels)

    def seed_of(self, kind: str, number: int) -> int:
        """Return the seed of a sequence's generator, below 2**63."""
        digest = hashlib.blake2b(f"{self._seed} {kind} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
