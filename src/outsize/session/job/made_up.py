"""Make up inputs of models that are tried or counted: random text, and images as a family's processor sizes them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import fake_tensors, parameters_of
from outsize.compat.transformers_private import image_processor_of
from outsize.errors import ConfigError
from outsize.runtime.trial.measured import SHORT_LENGTHS


def made_up_inputs(pack: str, hf_config: Any, num_sequences: int, seq_len: int) -> dict[str, Tensor]:
    """A microbatch of random tokens, such as training will see: ids and labels [num_sequences, seq_len], and a mask.

    Something is padded where anything may be, and there are two documents where there may be several: models of
    transformers make a mask only where they need one.
    """
    vocabulary = hf_config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (num_sequences, seq_len), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    if pack == "none":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][:, max(seq_len - 1, 1) :] = 0
    elif pack == "documents":
        inputs["position_ids"] = (torch.arange(seq_len) % max(seq_len // 2, 1)).expand_as(ids)
    return inputs


class ImageInputs:
    """Batches of text with one image a sequence, for a vision-language model of transformers on the meta device.

    Args:
        model: built of a whole config.
        image: what a config holds as `known_models.IMAGE`.

    Attributes:
        tokens: of the text that one image takes the place of, as many as the model makes of it.

    Raises:
        ConfigError: how its family sizes images is not known, or Pillow is missing.
    """

    def __init__(self, model: Any, image: Mapping[str, Any]) -> None:
        self._model, self._config = model, model.config
        try:
            from PIL import Image

            self._image = Image.new("RGB", tuple(image["pixels"]))
            self._processor, self._defaults = image_processor_of(self._config, image["settings"])
            self.tokens = self._num_tokens()
        except ImportError as error:
            raise ConfigError("--image: sizing images takes Pillow; pip install pillow") from error
        except Exception as error:  # whatever a model does with images that are none of its
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ConfigError(
                f"--image: what a {self._config.model_type} makes of an image is not known here ({why}); leave it out, "
                "and count its tokens within --seq-len"
            ) from error

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the sequences that are tried: the image, and a short text."""
        return tuple(self.tokens + length for length in SHORT_LENGTHS)

    def __call__(self, num_sequences: int, seq_len: int) -> dict[str, Any]:
        """Return what the model's forward takes, with labels of the text."""
        names = [name for name in vars(self._config) if name.endswith(("token_id", "token_index"))]
        special = {value for name in names if isinstance(value := getattr(self._config, name), int)}
        token = min(set(range(len(special) + 1)) - special)
        is_image = torch.zeros(num_sequences, seq_len, dtype=torch.bool)
        is_image[:, 1 : 1 + self.tokens] = True
        ids = torch.full(is_image.shape, token).masked_fill(is_image, self._image_token)
        kinds = is_image.long()
        inputs = {"token_type_ids": kinds, "mm_token_type_ids": kinds, **self._images(num_sequences)}
        signature = inspect.signature(self._model.forward).parameters
        given = {name: value for name, value in inputs.items() if name in signature}
        return {"input_ids": ids, "labels": ids.masked_fill(is_image, -100), **given}

    @property
    def _image_token(self) -> int:
        value = getattr(self._config, "image_token_id", None)
        return int(self._config.image_token_index if value is None else value)

    def _images(self, number: int) -> dict[str, Any]:
        batch = self._processor(images=[[self._image]] * number, return_tensors="pt", **self._defaults)
        dtype = next(self._model.parameters()).dtype
        return {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in batch.items()
            if isinstance(value, Tensor)
        }

    def _num_tokens(self) -> int:
        """Return in how many rows the model's own code puts an image among the embeddings of tokens."""
        encode = getattr(self._model, "model", self._model).get_image_features
        signature = inspect.signature(encode).parameters
        inputs = {name: value for name, value in self._images(1).items() if name in signature}
        each = [parameters_of(module) for module in self._model.modules()]
        parameters = [(names, name, parameter) for names in each for name, parameter in names.items()]
        try:
            with fake_tensors(allow_real=True), torch.no_grad():
                for names, name, parameter in parameters:
                    if parameter is not None:
                        names[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            with torch.no_grad():
                features = encode(**inputs)
        finally:
            for names, name, parameter in parameters:
                names[name] = parameter
        features = getattr(features, "pooler_output", features)
        parts = [features] if isinstance(features, Tensor) else features
        return sum(part.numel() // part.shape[-1] for part in parts)
