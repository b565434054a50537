"""Other commands than ``train`` under every fault: what was asked for, or a clear error and nothing left behind."""

import contextlib
import hashlib
import io
import json
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from unittest import mock

from crash.campaign import Campaign
from outsize.cli import main
from outsize.errors import OutsizeError, StorageError
from outsize.training.run import train
from tiny import tiny_run

_MEMORY = "--device cpu --device-memory 512MiB"
_ROOM = f"{_MEMORY} --home disk --store-dir OUT/store"
COMMANDS = {
    "verify": f"verify RUN/config.yaml --run-dir OUT/run --steps 1 {_MEMORY}",
    "score": f"score RUN --data RUN/../data.txt --context 16 --out OUT/scores.jsonl {_ROOM}",
    "logits": f"score RUN --data RUN/../data.txt --context 60 --want logits --out OUT/logits {_ROOM}",
    "generate": f"generate RUN --prompt a --prompt bc --prompt d --out OUT/texts.jsonl --max-new-tokens 2 {_ROOM}",
    "serve": f"serve RUN --port 0 {_ROOM}",
    "export": "export RUN --out OUT/model",
    "report": "report RUN -o OUT/page.html",
}
# Times, and where it listens.
_VARYING = re.compile(r"http://\S+|[0-9.]+ (ms|s|tokens/s)\b")
_ERROR = re.compile(r"outsize: (\w+Error): (.*)", re.DOTALL)


class CommandCampaign(Campaign):
    """Runs a command again and again on a run that has ended.

    Args:
        name: of the command.
        root: an empty directory.
    """

    def __init__(self, name: str, root: Path) -> None:
        config = tiny_run(root, train={"steps": 1}, memory={"home": "host"})
        train(config)
        self._arguments = COMMANDS[name].replace("RUN", str(root / "run")).replace("OUT", str(root / "out"))
        self._said = ""
        out = config.train.model_copy(update={"run_dir": str(root / "out")})
        super().__init__(config.model_copy(update={"train": out}), root)

    def _reset(self) -> None:
        super()._reset()
        self._run_dir.mkdir()

    def _train(self, *, again: bool = False) -> int:
        """Run the command, ``again`` over what the one that failed has left.

        Raises:
            OutsizeError: the command says so.
            AssertionError: it ends otherwise.
        """
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(signal, "pause", side_effect=lambda: _ask(out)),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.suppress(SystemExit),
        ):
            main(self._arguments.split())
        said = " ".join(err.getvalue().split())
        if told := _ERROR.search(said):
            raise (StorageError if told[1] == "StorageError" else OutsizeError)(told[2])
        assert "Traceback" not in said, said
        self._said = _VARYING.sub("", out.getvalue())
        return 0

    def _digest(self) -> dict[str, str]:
        found = {
            path: path.read_bytes()
            for path in self._run_dir.rglob("*")
            if path.suffix in (".jsonl", ".safetensors")
        }
        files = {
            str(path): hashlib.sha256(data).hexdigest()
            for path, data in found.items()
            if path.name != "heartbeat.jsonl"
        }
        return files | {"stdout": self._said}


def _ask(out: io.StringIO) -> None:
    """Ask what serves for a text, and write it where the command writes; a refusal is one of its disk."""
    url = out.getvalue().split()[0]
    asked = json.dumps({"model": "run", "prompt": "a", "max_tokens": 2, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/completions", asked, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            out.write(json.load(answer)["choices"][0]["text"])
    except urllib.error.HTTPError as refusal:
        raise StorageError(refusal.read().decode()) from refusal
