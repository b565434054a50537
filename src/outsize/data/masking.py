"""Masked language modelling: which tokens of a batch are hidden, drawn anew each time that a sequence is trained on.

The drawing is that of transformers' ``DataCollatorForLanguageModeling``, a sequence at a time and from a generator of
its own, seeded by what the sequence is: the position that a run draws it at, or its number where it is measured. So
masks are the same whichever thread makes a batch, wherever a run is resumed, and however many ranks share a step.
"""

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outsize.data.batch import IGNORED, Batch
from outsize.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Masker:
    """Hides tokens of batches, and makes targets of the hidden ones alone. May be called from any thread.

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
