"""Where a text ends: at a token that marks it, or at a string that a prompt's last words may begin."""

from collections.abc import Sequence
from typing import Any

import torch

from outsize.wrapped.writing.generation_settings import ends_of


class Endings:
    """Cuts what is written behind its end: of a batch, `generate` goes on until the last text has ended.

    Args:
        tokenizer: of transformers.
        settled: see `settle_settings`.
    """

    def __init__(self, tokenizer: Any, settled: Any) -> None:
        from transformers import StopStringCriteria

        self._marks = ends_of(settled)
        strings = settled.stop_strings
        self._strings = StopStringCriteria(tokenizer, strings) if strings else None

    def cut(self, before: Sequence[int], row: list[int]) -> tuple[list[int], bool]:
        """Return the tokens of a text up to its end, and whether it has one.

        Args:
            before: tokens that it follows.
            row: the tokens written, and what fills them up.
        """
        for count, token in enumerate(row, 1):
            if token in self._marks or self._is_said(before, row[:count]):
                return row[:count], True
        return row, False

    def _is_said(self, before: Sequence[int], row: Sequence[int]) -> bool:
        if self._strings is None:
            return False
        most = self._strings.maximum_token_len
        ids = [*before[-most:], *row[-most:]][-most:]
        return bool(self._strings(torch.tensor([ids]), None))
