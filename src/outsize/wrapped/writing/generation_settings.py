"""What a checkpoint's ``generation_config.json`` asks of a text: done as transformers does it, or refused by name.

Every key is one of four kinds, and a test holds the table to all that transformers knows:

1. `HONOURED`: `generate` does it, with the same tokens as for the resident model. Those of `BY_SCORES` look at the
   scores of the next token or at what is written; those of `BY_TEXT` at the prompt as well, so it may have no padding.
2. `WITHOUT_EFFECT`: it says how a result is handed over or where a cache lies, which are decided here, or belongs to
   something that is not there, such as an assistant. No token depends on it.
3. `MODES`: it has another way of choosing tokens take over, which is not done here; refused where it would.
4. `REFUSED`: it would write something else, or several texts; refused where it is set.
"""

import contextlib
import copy
import logging
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

BY_SCORES = frozenset(
    [
        *("do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff"),
        *("eta_cutoff", "num_beams", "early_stopping", "length_penalty", "diversity_penalty"),
        *("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "min_new_tokens"),
        *("exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits"),
        *("guidance_scale", "stop_strings", "max_time", "eos_token_id", "bos_token_id"),
        *("decoder_start_token_id", "prefill_chunk_size"),
    ]
)
# These look at the tokens before, or count them, padding among them; each with what it is where it does nothing.
BY_TEXT: Mapping[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "min_length": 0,
    "watermarking_config": None,
}
HONOURED = BY_SCORES | BY_TEXT.keys()
WITHOUT_EFFECT = frozenset(
    [
        *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_logits"),
        *("output_scores", "cache_implementation", "cache_config", "max_cache_len", "compile_config"),
        *("disable_compile", "low_memory", "max_length", "continuous_batching_config", "is_assistant"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind", "speculation_type"),
        *("max_matching_ngram_size", "max_new_tokens", "pad_token_id", "use_cache", "transformers_version"),
        "_from_model_config",
    ]
)
MODES: Mapping[str, tuple[str, ...]] = {
    "contrastive_search": ("penalty_alpha",),
    "constrained_beam_search": ("constraints", "force_words_ids"),
    "group_beam_search": ("num_beam_groups",),
    "assisted_generation": ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
    "dola_generation": ("dola_layers",),
}
REFUSED: Mapping[str, str] = {
    "num_return_sequences": "a prompt gets one text; give the prompt several times",
    "token_healing": "prompts are taken as they are",
}
_OTHER_CACHES = ("quantized", "paged")  # all others hold keys and values as they are
_WHERE = "generation_config.json"


def settle_settings(model: nn.Module, tokenizer: Any, choice: Mapping[str, Any]) -> Any:
    """Return the generation config that a text is written by, checked before anything is computed.

    Args:
        model: that can generate.
        tokenizer: its own.
        choice: what is said beside the file, as keyword arguments of `generate`.

    Raises:
        ConfigError: it asks for what is not done, or for what cannot be; names the key.
    """
    given = cast(Any, model).generation_config
    settled = copy.deepcopy(given)
    _tell_unknown(given)
    if given.cache_implementation in _OTHER_CACHES:
        raise _refusal(given, "cache_implementation", "it rounds, or cuts, the cache of keys and values")
    for key, why in REFUSED.items():
        value = getattr(given, key, None)
        if value is True or value not in (None, False, 1):
            raise _refusal(given, key, why)
    for key in WITHOUT_EFFECT:
        if hasattr(settled, key):
            setattr(settled, key, None)
    _check_marks(given, tokenizer)
    if not (given.num_beams is None or (isinstance(given.num_beams, int) and given.num_beams >= 1)):
        raise _refusal(given, "num_beams", "it has to be a whole number, 1 or more")
    error = _error_of(model, settled, choice)
    if error is not None:
        keys = [key for keys in (*MODES.values(), sorted(HONOURED)) for key in keys]
        keys = [key for key in keys if getattr(settled, key, None) is not None]
        blamed = [key for key in keys if _error_of(model, _without(settled, key), choice) is None]
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _refusal(given, blamed[0] if blamed else "", first_line)
    return settled


@contextlib.contextmanager
def settled_in(model: nn.Module, settled: Any) -> Iterator[None]:
    """Have a model generate by these settings while the context lasts, and by nothing that its own say beside them."""
    held = cast(Any, model)
    former, held.generation_config = held.generation_config, settled
    try:
        yield
    finally:
        held.generation_config = former


def looks_at_padding(settled: Any, *, encodes: bool) -> bool:
    """Return whether a key chooses tokens by those before, so that padding among them would choose others.

    Args:
        settled: see `settle_settings`.
        encodes: whether what is padded is what an encoder reads; the text of its decoder has no padding then.
    """
    set_ = (key for key, nothing in BY_TEXT.items() if getattr(settled, key) not in (None, nothing))
    return any(not encodes or key.startswith("encoder_") for key in set_)


def ends_of(settled: Any) -> frozenset[int]:
    """Return the ids that end a text, of which a model may have several, or none."""
    found = settled.eos_token_id
    found = found.flatten().tolist() if isinstance(found, Tensor) else found
    return frozenset(found if isinstance(found, list | tuple) else () if found is None else (found,))


def _tell_unknown(given: Any) -> None:
    known = {*HONOURED, *WITHOUT_EFFECT, *REFUSED, *(key for keys in MODES.values() for key in keys)}
    unknown = [
        key for key, value in vars(given).items() if key not in known and value is not None and key[0] != "_"
    ]
    if unknown:
        _log.warning("%s: %s: known to nothing here, and not used", _WHERE, ", ".join(unknown))


def _check_marks(given: Any, tokenizer: Any) -> None:
    """Refuse marks by their text, and strings that are none."""
    for key in (
        "eos_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
    ):
        value = getattr(given, key)
        for token in value if isinstance(value, list | tuple) else (value,):
            if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
                number = tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else None
                advice = f"; the id of {token!r} is {number}" if number is not None else ""
                raise _refusal(given, key, f"it has to be the id of a token{advice}")
    texts = given.stop_strings
    texts = [texts] if isinstance(texts, str) else texts
    if texts is not None and not (
        isinstance(texts, list) and all(isinstance(one, str) and one for one in texts)
    ):
        raise _refusal(given, "stop_strings", "it has to be a text, or a list of texts, none of them empty")


def _error_of(model: nn.Module, settled: Any, choice: Mapping[str, Any]) -> Exception | None:
    """Return what transformers has against these settings: it prepares a text of them, and no forward runs."""
    from transformers import GenerationMixin
    from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

    vocabulary = cast(Any, model).config.get_text_config().vocab_size
    settled = _without(settled, "stop_strings")  # checked apart: they need the tokenizer

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **_: Any,
    ) -> Tensor:
        # With what transformers takes for unsaid keys.
        mode = str(generation_config.get_generation_mode().value)
        if mode in MODES:
            raise NotImplementedError(f"{mode.replace('_', ' ')} is not done here")
        for process in logits_processor:
            if not isinstance(process, UnbatchedClassifierFreeGuidanceLogitsProcessor):  # calls the model
                process(input_ids, torch.zeros(len(input_ids), vocabulary, device=input_ids.device))
        return input_ids

    ids = torch.zeros((1, 2), dtype=torch.long)
    asked = {**choice, "max_new_tokens": 2, "pad_token_id": 0, "use_cache": True, "custom_generate": decode}
    asked.pop("stopping_criteria", None)
    try:
        with torch.no_grad(), settled_in(model, settled), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the text itself will warn
            GenerationMixin.generate(cast(Any, model), ids, attention_mask=torch.ones_like(ids), **asked)
    except Exception as error:  # whatever its many parts raise
        return error
    return None


def as_tokens(given: Iterable[int], name: str) -> list[int]:
    """Return the tokens of the text called ``name``.

    Raises:
        DataError: what is given is no sequence of whole numbers.
    """
    try:
        return [operator.index(token) for token in given]
    except TypeError:
        raise DataError(
            f"{name} is {given!r:.60}, not a list of tokens; give those of a tokenizer: tokenizer(text).input_ids"
        ) from None


def check_counts(max_new_tokens: int, batch_size: int, in_flight: int | None) -> None:
    """Refuse counts of nothing.

    Raises:
        ConfigError: one is below 1.
    """
    if min(max_new_tokens, batch_size, 1 if in_flight is None else in_flight) < 1:
        flying = "" if in_flight is None else f", in_flight {in_flight}"
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, batch_size {batch_size}{flying}; all are at least 1"
        )


def _without(config: Any, key: str) -> Any:
    changed = copy.deepcopy(config)
    setattr(changed, key, None)
    return changed


def _refusal(given: Any, key: str, why: str) -> ConfigError:
    said = f"{key} is {getattr(given, key)!r}: " if key else ""
    return ConfigError(f"{_WHERE}: {said}{why}; remove it from the file, or change it")
