"""What a model is called with: batches of data, and made-up ones like them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outsize.config import Config
from outsize.data.batch import IGNORED, Batch


def num_targets(batch: Batch, shifted: bool) -> int:
    """Tokens that a model's loss is a mean over; a model that predicts the token in its place shifts nothing."""
    return batch.num_target_tokens if shifted else int((batch.labels != IGNORED).sum())


def model_inputs(batch: Batch) -> Mapping[str, Tensor]:
    """The keyword arguments of a model's forward for ``batch``."""
    inputs = {"input_ids": batch.input_ids, "labels": batch.labels}
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
    return inputs


def made_up_inputs(config: Config, hf_config: Any, num_sequences: int, seq_len: int) -> dict[str, Tensor]:
    """A microbatch of random tokens, such as training will see: ids and labels [num_sequences, seq_len], and a mask.

    Something is padded where anything may be: without padding models of transformers make no mask.
    """
    vocabulary = hf_config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (num_sequences, seq_len), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    if not config.data.pack:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][:, max(seq_len - 1, 1) :] = 0
    return inputs
