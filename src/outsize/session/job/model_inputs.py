"""What a model is called with: targets of its batches, and made-up batches like them."""

from typing import Any

import torch
from torch import Tensor

from outsize.config import Config
from outsize.data.batch import IGNORED, Batch


def num_targets(batch: Batch, shifted: bool) -> int:
    """Tokens that a model's loss is a mean over; a model that predicts the token in its place shifts nothing."""
    return batch.num_target_tokens if shifted else int((batch.labels != IGNORED).sum())


def made_up_inputs(config: Config, hf_config: Any, num_sequences: int, seq_len: int) -> dict[str, Tensor]:
    """A microbatch of random tokens, such as training will see: ids and labels [num_sequences, seq_len], and a mask.

    Something is padded where anything may be, and there are two documents where there may be several: models of
    transformers make a mask only where they need one.
    """
    vocabulary = hf_config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (num_sequences, seq_len), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    if config.data.pack == "none":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][:, max(seq_len - 1, 1) :] = 0
    elif config.data.pack == "documents":
        inputs["position_ids"] = (torch.arange(seq_len) % max(seq_len // 2, 1)).expand_as(ids)
    return inputs
