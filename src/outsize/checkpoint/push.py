"""A trained model on the hub of Hugging Face, with a card that says how it came about."""

from glob import escape
from pathlib import Path
from typing import Any

from outsize.checkpoint.files.checkpoint_files import ADAPTER_CONFIG, is_own_file
from outsize.config import Config, load_config
from outsize.errors import ConfigError, StorageError

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
        made = self._call("create_repo", private=not self._public, exist_ok=True)
        self._repo, self.url = made.repo_id, str(made)
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
