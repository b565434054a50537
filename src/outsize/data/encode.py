"""Documents to token ids and training masks, in batches through the fast tokenizer.

The tokenizers library works on a batch with threads of its own. ``TOKENIZERS_PARALLELISM`` and
``RAYON_NUM_THREADS`` govern it as always; nothing here sets them, and nothing here forks.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outsize.compat.transformers_private import encodes_as_the_library
from outsize.data.chat import ChatTemplate
from outsize.data.chat.reply_spans import Span
from outsize.data.reading.formats import Document
from outsize.data.reading.text_records import PIECE_CHARS, refuse
from outsize.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# The library spreads the texts of a batch over the cores, so a batch holds a full piece for each; an encoding
# takes about 100 bytes per token while it lives, which the upper bound keeps to some 20 MiB.
BATCH_CHARS = PIECE_CHARS * min(max(os.cpu_count() or 1, 4), 32)
BATCH_DOCUMENTS = 256
_EOS_REACH = 4  # a chat template that closes a conversation does so this near its end


@dataclass(frozen=True)
class Encoded:
    """Tokens of a document, or of a piece of one.

    Attributes:
        ids: int32 ``[n]``.
        trained: uint8 ``[n]``, 1 where a token is a target; ``None`` where all are.
        closes: the document ends here.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.uint8] | None
    closes: bool


class _Encoding(Protocol):
    """What a tokenizer makes of a text; both are made into lists anew each time that they are asked for."""

    @property
    def ids(self) -> list[int]:
        """The tokens."""

    @property
    def offsets(self) -> list[Span]:
        """The characters of each."""


class _Lists(NamedTuple):
    """An `_Encoding` of a tokenizer that hands out lists."""

    ids: list[int]
    offsets: list[Span]


class Tokenized(NamedTuple):
    """Documents on their way: their texts are tokenised, and nothing of that is an array yet.

    Attributes:
        documents: in order.
        encodings: of each.
        spans: of each, the characters that are trained.
    """

    documents: Sequence[Document]
    encodings: list[_Encoding]
    spans: list[list[Span]]


class Encoder:
    """Tokenises documents of one data set.

    A document begins with what the tokenizer itself puts in front of a text (often a BOS token, often
    nothing). It ends with what the tokenizer puts behind, or else, if ``eos``, with the EOS token. Neither is put
    where the text has it already.
    Conversations get both from their template; an EOS token is added where the template closes without one.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        eos: end documents with the EOS token.
        masked: documents have a part that is not trained.
        template: of conversations, see `ChatTemplate`.
        forgive: called with the error of a conversation that the template refuses; the conversation is left out if
            the call returns.

    Attributes:
        chat: the template.
        has_named_template: whether ``template`` says which.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        eos: bool,
        masked: bool,
        template: str | None = None,
        forgive: Callable[[DataError], None] = refuse,
    ) -> None:
        if masked and not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it cannot say which tokens belong "
                "to a prompt; convert it, or train on plain text"
            )
        self._tokenizer = tokenizer
        self._masked = masked
        self._forgive = forgive
        self.chat = ChatTemplate(tokenizer, template)
        self.has_named_template = template is not None
        self._prefix, suffix = added_tokens(tokenizer)
        self._eos_id: int | None = tokenizer.eos_token_id
        self._suffix = suffix if suffix or self._eos_id is None else [self._eos_id]
        if not eos:
            self._suffix = []
        elif not self._suffix:
            logger.warning("the tokenizer has no EOS token: documents follow each other without a separator")

    def fingerprint(self) -> str:
        """Return a hash of everything in the tokenizer that decides how documents become tokens."""
        parts = [self.chat.text, repr(self._prefix), repr(self._suffix), _vocabulary_text(self._tokenizer)]
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Return the tokens of each document, in order.

        Raises:
            DataError: a conversation that the chat template refuses.
        """
        return self.finish(self.tokenize(documents))

    def tokenize(self, documents: Sequence[Document]) -> Tokenized:
        """Do the part of `encode` that the tokenizer's own threads do, while Python is free for others."""
        batch: list[Document] = []
        texts, spans = [], []
        for document in documents:
            try:
                text, trained = self._rendered(document)
            except DataError as error:
                self._forgive(error)
                continue
            batch.append(document)
            texts.append(text)
            spans.append(trained)
        return Tokenized(batch, self._encodings(texts) if texts else [], spans)

    def finish(self, tokenized: Tokenized) -> list[Encoded]:
        """Do the rest of `encode`."""
        return [self._finish(*each) for each in zip(*tokenized, strict=True)]

    def _encodings(self, texts: list[str]) -> list[_Encoding]:
        """Tokenise as calling the tokenizer does, by its backend where that is all that a call would do.

        A call also makes lists of what nobody asked for, and follows characters that only a mask needs.
        """
        backend = _plain_backend(self._tokenizer)
        if backend is not None:
            encode = backend.encode_batch if self._masked else backend.encode_batch_fast
            return list(encode(texts, add_special_tokens=False))
        encoded: Any = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=self._masked,
            verbose=False,
        )
        offsets = encoded.get("offset_mapping") or [[] for _ in texts]
        return [_Lists(*each) for each in zip(encoded["input_ids"], offsets, strict=True)]

    def _rendered(self, document: Document) -> tuple[str, list[Span]]:
        if document.messages is None:
            return document.text, [(document.trained_from, len(document.text))]
        return self.chat.render(
            document.messages,
            document.turns,
            document.tools,
            document.where,
            document.options,
            document.num_asked,
        )

    def _finish(self, document: Document, encoding: _Encoding, spans: list[Span]) -> Encoded:
        ids, trained = encoding.ids, None
        if self._masked:
            trained = _mask(np.array(encoding.offsets, np.int64).reshape(-1, 2), spans)
        if document.messages is not None:
            assert trained is not None
            return self._close_chat(document, ids, trained)
        # A text may hold them already, as one does that a chat template has written.
        before = self._prefix if document.opens and ids[: len(self._prefix)] != self._prefix else []
        after = self._suffix if document.closes and ids[-len(self._suffix) :] != self._suffix else []
        array = np.array([*before, *ids, *after], np.int32)
        if trained is not None:
            trained = np.concatenate(
                [np.zeros(len(before), np.uint8), trained, np.ones(len(after), np.uint8)]
            )
        return Encoded(array, trained, document.closes)

    def _close_chat(self, document: Document, ids: list[int], trained: NDArray[np.uint8]) -> Encoded:
        """Add the EOS token unless the template did; it is a target if the last message is."""
        array = np.array(ids, np.int32)
        if self._suffix and self._eos_id is not None and self._eos_id not in ids[-_EOS_REACH:]:
            assert document.messages is not None
            closes_trained = document.turns is None or len(document.messages) - 1 in document.turns
            array = np.append(array, np.int32(self._eos_id))
            trained = np.append(trained, np.uint8(closes_trained))
        return Encoded(array, trained, closes=True)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents so that a batch holds about `BATCH_CHARS` characters, or one longer document."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        length = len(document.text) + sum(len(m["content"]) for m in document.messages or ())
        if batch and (size + length > BATCH_CHARS or len(batch) == BATCH_DOCUMENTS):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += length
    if batch:
        yield batch


def _mask(offsets: NDArray[np.int64], spans: list[Span]) -> NDArray[np.uint8]:
    """Return 1 for tokens that spell characters of a span.

    A token across the border of prompt and completion (" 4", where the prompt ends with the space) is a
    target: a short completion would otherwise have none.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    trained = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        # Some tokenizers trim white space off the characters of a token, and leave none of a token of white space.
        inside = np.where(ends > begins, (ends > start) & (begins < end), (begins > start) & (ends < end))
        if inside.any():
            first, *_, last = np.flatnonzero(inside)[[0, -1]]
            trained[first : last + 1] = 1
    return trained


def added_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _plain_backend(tokenizer: "PreTrainedTokenizerBase") -> Any | None:
    """Return the backend of a fast tokenizer whose call is nothing but a call of that, as the backend stands now."""
    if not tokenizer.is_fast:
        return None
    backend: Any = tokenizer.backend_tokenizer
    plain = (
        encodes_as_the_library(tokenizer)
        and backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )
    return backend if plain else None


def _vocabulary_text(tokenizer: "PreTrainedTokenizerBase") -> str:
    if not tokenizer.is_fast:
        return repr(sorted(tokenizer.get_vocab().items()))
    text: str = tokenizer.backend_tokenizer.to_str()
    # What stands before the vocabulary is how the last call padded and truncated: state, not identity.
    return text[max(0, text.find('"added_tokens"')) :]
