"""A trained model on the hub of Hugging Face, with a card that says how it came about."""

from pathlib import Path
from typing import Any

from outsize.config import Config, load_config
from outsize.errors import ConfigError, StorageError
from outsize.model.adapters import ADAPTER_CONFIG

CARD = "README.md"


class Hub:
    """A repository on the hub, made where there is none.

    Args:
        repo: ``OWNER/NAME``.
        public: whether everybody sees a repository that is made.

    Raises:
        ConfigError: no name of a repository.
        StorageError: the hub refuses it.
    """

    def __init__(self, repo: str, *, public: bool = False) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        self._repo, self._api = repo, HfApi()
        try:
            self.url = str(self._call("create_repo", private=not public, exist_ok=True))
        except HFValidationError as error:
            raise ConfigError(f"--push {repo}: {error}") from error

    def upload(self, directory: Path, run_dir: Path) -> None:
        """Send a model of a run, with a card where the model has none.

        Raises:
            StorageError: the hub refuses it; the model stays in ``directory``.
        """
        card = directory / CARD
        if not card.exists():
            config = load_config(run_dir / "config.yaml")
            adapters = (directory / ADAPTER_CONFIG).is_file()
            card.write_text(make_card(self._repo, config, is_adapters=adapters), encoding="utf-8")
        self._call("upload_folder", folder_path=str(directory))

    def _call(self, name: str, **given: Any) -> Any:
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        try:
            return getattr(self._api, name)(repo_id=self._repo, **given)
        except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise StorageError(
                f"the hub does not take {self._repo}: {first_line}; `hf auth login` with a token that may write there"
            ) from error


def make_card(repo: str, config: Config, *, is_adapters: bool) -> str:
    """Return the card of a model: what it was trained from, and how. It names no path of the machine."""
    from huggingface_hub import ModelCard, ModelCardData

    base = config.model.path
    is_local = Path(base).exists() or base.count("/") != 1
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
