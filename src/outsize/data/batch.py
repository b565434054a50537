"""Batches of tokens: their tensors, and memory that is used again.

Arrays whose memory is used again once nobody holds them.

A batch of fresh memory costs a page fault for every 4 KiB, more than reading its tokens does. So the memory of a
batch comes back, and a run of equal batches walks round a ring of as many blocks as are alive at once:

1. `take` hands out an array over a free block, or over a new one;
2. the array is held by the tensor made of it, and by every view of that;
3. when the last of them is gone, and no earlier, the block is free again.

Nobody has to give anything back, and nobody can be handed memory that somebody still reads.
"""

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outsize.errors import ConfigError

# Blocks that are kept: what a prefetcher has ready, the batch of the step, and the one in the making.
_NUM_FREE_MAX = 8


class RecycledArrays:
    """Hands out int64 arrays. Safe to use from several threads."""

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
        """
        return replace(
            Batch.made_of({name: tensor.pin_memory() for name, tensor in self.inputs.items()}),
            whole=self.whole,
        )

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
