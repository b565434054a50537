"""Read the model that ``outsize plan`` is asked about, and the run whose settings stand where no flag does."""

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outsize import files
from outsize.cli.plan.plan_options import PlanFlags
from outsize.config import Config, load_config
from outsize.errors import CheckpointError, ConfigError, ModelError
from outsize.model.sizes.model_spec import ModelSpec, Workload, check_sizes
from outsize.runtime.trial.counts import Counts
from outsize.session.job.known_models import (
    CLASS,
    IMAGE,
    SAMPLE,
    Described,
    counted,
    described,
    pixels_of,
    sample_of,
)

# Tokens of a sequence, where the user names none.
DEFAULT_SEQ_LEN = 2048
# Of its text, where it has an image besides that takes most of them.
TEXT_OF_IMAGE = 512
# Settings of a run by the option that names them.
SETTINGS = {
    "model.dtype": "dtype",
    "model.products": "products",
    "model.compile": "compile",
    "train.microbatches": "microbatches",
    "train.mlp_parts": "mlp_parts",
    "train.head_chunk_tokens": "head_chunk_tokens",
    "optimizer.max_grad_norm": "max_grad_norm",
    "optimizer.clip": "clip",
    "optimizer.name": "optimizer",
    "optimizer.state": "optimizer_state",
    "optimizer.masters": "masters",
    "optimizer.ns_on": "ns_on",
    "memory.home": "home",
    "memory.commits": "commits",
    "memory.resident": "resident",
    "transport.weights": "transport_weights",
    "parallel.gradients": "net_gradients",
}
# More of them, which options write in another way.
ALSO = {
    "data.path": "data",
    "train.method": "method",
    "data.seq_len": "seq_len",
    "lora.r": "lora_r",
    "lora.base_codec": "base_codec",
}


def is_run(model: str) -> bool:
    """Return whether ``model`` names the YAML file of a run rather than a model."""
    return model.endswith((".yaml", ".yml"))


def read_run(path: str) -> Config:
    """Return the configuration in a YAML file, which need not name data; the environment is that of another machine.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """
    return load_config(path, environ={}, defaults={"data.path": "data"})


def with_run(options: PlanFlags) -> PlanFlags:
    """Return ``options`` with the settings of the run that is their model, but for those that the user wrote.

    A run is named by its YAML file, or by its directory.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """
    directory = Path(os.path.expanduser(options.model))
    if (directory / "config.yaml").is_file() and not (directory / "config.json").is_file():
        options = replace(options, model=str(directory / "config.yaml"))
    if not is_run(options.model):
        return options
    run = read_run(options.model)
    values: dict[str, Any] = {}
    for setting, option in (SETTINGS | ALSO).items():
        section, key = setting.split(".")
        values[option] = getattr(getattr(run, section), key)
    values["tokens_per_step"] = run.tokens_per_step
    values["resident"] = str(run.memory.resident)
    values["kernels"] = None if run.model.kernels == "none" else run.model.kernels
    for budget in ("device_memory", "host_memory"):
        num_bytes = getattr(run.memory, budget)
        values[budget] = None if num_bytes is None else f"{num_bytes}B"
    if run.model.dtype == "auto":
        del values["dtype"]
    return replace(
        options, **{option: value for option, value in values.items() if option not in options.named}
    )


WorkloadOf = Callable[[int], Workload]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """A model as a question has it.

    Attributes:
        spec: its units.
        workload_of: what a microbatch of so many sequences takes.
        in_mlp_parts: the same with MLPs in so many parts; None where they cannot, do already, or are not asked about.
        notes: what was taken for granted, for people.
    """

    spec: ModelSpec
    workload_of: WorkloadOf
    in_mlp_parts: Callable[[int], WorkloadOf] | None = None
    notes: tuple[str, ...] = ()


class AskedModel:
    """A model by its ``config.json``.

    Args:
        path: where it lies, as a configuration names it.
        hf_config: of the model.
        run: YAML file of the run that trains it, where that was named.
        notes: what of that run was taken for granted, for people.
    """

    def __init__(
        self, path: str, hf_config: Mapping[str, Any], run: str | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        self.path = path
        self.run = run
        self._notes = notes
        self._hf_config = hf_config

    @cached_property
    def described(self) -> Described:
        """The model in the words of transformers."""
        return described(self._hf_config)

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence; None for no limit."""
        return self.described.positions

    def with_samples(self, options: PlanFlags) -> "tuple[AskedModel, int]":
        """Return this model with the samples that options name, and the tokens of one.

        Raises:
            ConfigError: the model has no such samples, or `outsize train` would not train it.
        """
        wanted, limit = options.seq_len, self.positions
        if CLASS in self._hf_config:
            if options.output_file is not None:
                raise ConfigError(
                    "--output: outsize train trains language models; wrap this one (outsize.wrap)"
                )
            sample = sample_of(self._hf_config, wanted, options.image, options.frames)
            fields = {**self._hf_config, SAMPLE: list(sample)}
            return AskedModel(self.path, fields, self.run), sample.tokens
        if options.frames is not None:
            raise ConfigError("--frames: is of video models of diffusers; of others write --seq-len")
        if options.image is not None:
            return self._with_image(options, pixels_of(options.image))
        if wanted is None:
            return self, min(DEFAULT_SEQ_LEN, limit or DEFAULT_SEQ_LEN)
        if limit is not None and wanted > limit:
            raise ConfigError(
                f"--seq-len: {wanted} is longer than the {limit} positions of the model; lower it"
            )
        return self, wanted

    def _with_image(self, options: PlanFlags, pixels: list[int]) -> "tuple[AskedModel, int]":
        """Return this model with an image in each sequence, and the tokens of one with its text."""
        if options.output_file is not None:
            raise ConfigError("--output: outsize train trains on text alone; wrap this model (outsize.wrap)")
        image = {"pixels": pixels, "settings": _image_settings(self.path)}
        model = AskedModel(self.path, {**self._hf_config, IMAGE: image}, self.run, self._notes)
        tokens = model.described.image_tokens
        seq_len = options.seq_len or max(DEFAULT_SEQ_LEN, tokens + TEXT_OF_IMAGE)
        if not tokens + 1 < seq_len <= (model.positions or seq_len):
            raise ConfigError(
                f"--seq-len: {seq_len} tokens are to hold the {tokens:,} of an image and a text, within the model's "
                f"{model.positions or 'own'} positions; change it, or --image"
            )
        return model, seq_len

    def figures(self, config: Config) -> ModelFigures:
        """Return the model as a run with ``config`` would train it.

        Raises:
            ModelError: none that a run can train, or its config lacks a size.
            ConfigError: adapters for layers that it does not have.
        """
        kind, part = self.described.kind, self.described.part
        counts = counted(self._hf_config, config)
        alone = f"of this model its text part alone, {part}, is planned: --image plans it whole"
        notes = self._notes if part is None else (*self._notes, alone)
        if image := self._hf_config.get(IMAGE):
            usual = "sized as usual for its family, since no settings of its processor are there"
            by = "as its processor sizes it" if image["settings"] else usual
            what = f"an image of {image['pixels'][0]} by {image['pixels'][1]} pixels, {by}, is"
            notes = (*notes, f"{what} {self.described.image_tokens:,} tokens of each sequence")
        elif self.described.has_more:
            notes = (
                *notes,
                "it is planned whole, and its batches as text alone: write --image, where they have one",
            )
        if stored := self.described.stored:
            notes = (
                *notes,
                f"its weights are stored as {stored}; the answer is for them in {config.model.dtype}",
            )
        library = "transformers"
        if sample := self._hf_config.get(SAMPLE):
            library = "diffusers"
            notes = (
                f"a sample is {sample[0]:,} tokens of an image or video and {sample[1]:,} of its text; VAE and text "
                "encoders are not in it",
            )
        as_they_are = config.model.compile == "off" and config.model.kernels == "none"
        return ModelFigures(
            spec=counts.spec,
            workload_of=_workload_of(counts, config),
            in_mlp_parts=self._in_parts(config) if counts.can_part and as_they_are else None,
            notes=(*notes, f"counted on the model that {library} builds of a {kind} config, without weights"),
        )

    def _in_parts(self, config: Config) -> Callable[[int], WorkloadOf]:
        def parted(mlp_parts: int) -> WorkloadOf:
            train = config.train.model_copy(update={"mlp_parts": mlp_parts})
            cut = config.model_copy(update={"train": train})
            return _workload_of(counted(self._hf_config, cut), cut)

        return parted


def _workload_of(counts: Counts, config: Config) -> WorkloadOf:
    seq_len = config.data.seq_len
    if config.model.compile == "blocks":
        return lambda sequences: _compiled(counts.workload(sequences, seq_len))
    return lambda sequences: counts.workload(sequences, seq_len)


def adapted_modules(text: str | None) -> str | tuple[str, ...] | None:
    """Return the layers with adapters as a configuration names them; None for PEFT's choice."""
    if text is None or text.strip() == "all-linear":
        return text and text.strip()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _compiled(work: Workload) -> Workload:
    """Return what compiled blocks take: nothing from within is kept by itself, and no recompute ends early."""
    return replace(
        work, recompute_flops=work.forward_flops, attention_bytes=(), attention_flops=(), products_bytes=()
    )


# What the hub allows as an id, see `huggingface_hub.utils.validate_repo_id`: a name, or an owner and a name.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_config(model: str) -> tuple[str, Mapping[str, Any]]:
    """Return what ``model.path`` of a run would be, and the config.

    Of a hub id no weights are fetched; without a network the file of an earlier time is taken.

    Raises:
        ModelError: neither a path that exists nor an id whose config can be had.
        CheckpointError: no config there, or one that cannot be read.
    """
    path = Path(os.path.expanduser(model))
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        return str(file.parent), _parsed(model, file)
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"{model}: no such file or directory; give a model directory, its config.json, or a hub id"
        )
    return model, _parsed(model, fetch_config(model))


def fetch_config(hub_id: str) -> Path:
    """Return where the ``config.json`` of a model on the hub lies, fetched if it must be.

    Raises:
        ModelError: there is no such file or directory, and the hub has no such model or cannot be asked.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    what = f"{hub_id}: no such file or directory"
    try:
        return _fetched(hub_id, "config.json")
    except GatedRepoError as error:
        raise ModelError(
            f"{what}, and the model of that name on the hub is gated; `hf auth login` first"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{what}, and the hub has no model of that name; check the spelling") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{what}, and the hub cannot be asked for its config.json (no network, and none from an earlier time); "
            "give a model directory or its config.json"
        ) from error


def _fetched(hub_id: str, name: str) -> Path:
    from huggingface_hub import constants, hf_hub_download

    only_here = constants.HF_HUB_OFFLINE or not _is_there(constants.ENDPOINT)
    return Path(hf_hub_download(hub_id, name, local_files_only=only_here))


def _is_there(endpoint: str) -> bool:
    """Whether the name of a host is known: without a network it is not, and the hub's client would try for long."""
    try:
        return bool(socket.getaddrinfo(urlsplit(endpoint).hostname, None))
    except OSError:
        return False


def _image_settings(model: str) -> Mapping[str, Any]:
    """Return the settings of the image processor beside a config, here or on the hub; none where there are none."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            file = Path(model) / name if Path(model).exists() else _fetched(model, name)
        except OSError:  # the hub has no such file, or cannot be asked
            continue
        if file.is_file():
            settings = _parsed(model, file)
            return dict(settings.get("image_processor", settings if name.startswith("pre") else {}))
    return {}


def _parsed(model: str, file: Path) -> Mapping[str, Any]:
    if not os.path.lexists(file):
        raise CheckpointError(
            f"{model} has no config.json; give a model directory, its config.json, or a hub id"
        )
    fields = files.read_json(
        file, CheckpointError, "give the config.json that lies beside the weights of a model"
    )
    check_sizes(fields, file)
    return fields
