"""The config of a model that a command was given: a directory, a bare ``config.json``, or a hub id."""

import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outsize.errors import CheckpointError, ModelError
from outsize.model.sizes.config_sizes import check_sizes

# What the hub allows as an id, see `huggingface_hub.utils.validate_repo_id`: a name, or an owner and a name.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_config(model: str) -> tuple[str, Mapping[str, Any]]:
    """Return what ``model.path`` of a run would be, and the config.

    Of a hub id only ``config.json`` is fetched; without a network the one of an earlier time is taken.

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
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    what = f"{hub_id}: no such file or directory"
    try:
        only_here = constants.HF_HUB_OFFLINE or not _is_there(constants.ENDPOINT)
        return Path(hf_hub_download(hub_id, "config.json", local_files_only=only_here))
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


def _is_there(endpoint: str) -> bool:
    """Whether the name of a host is known: without a network it is not, and the hub's client would try for long."""
    try:
        return bool(socket.getaddrinfo(urlsplit(endpoint).hostname, None))
    except OSError:
        return False


def _parsed(model: str, file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{model} has no config.json; give a model directory, its config.json, or a hub id"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        remedy = "fetch it again, or give another"
        if file.suffix in (".yaml", ".yml"):
            remedy = (
                f"outsize plan takes a model; the plan of a run is that of outsize train {file} --dry-run"
            )
        raise CheckpointError(f"cannot read {file} as JSON: {error}; {remedy}") from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{file} is not the config of a model; give the config.json that lies beside its weights"
        )
    check_sizes(found, file)
    return found
