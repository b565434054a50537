"""What README tells somebody to type who has nothing yet: a chat with a model that was trained on chats."""

import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from cli.command_line import status_of
from support import make_model_dir

ROOT = Path(__file__).parents[2]


def commands() -> list[list[str]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## From nothing to a chat")
    block = section.partition("```sh\n")[2].partition("```")[0]
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]


def test_the_commands_lead_from_nothing_to_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
):
    """Over a smaller model."""
    monkeypatch.chdir(tmp_path)
    install, make, train, generate = commands()
    assert install == ["pip", "install", "."]
    assert make == ["python", "examples/small_llama.py", ".demo"]
    chats = runpy.run_path(str(ROOT / "examples" / "small_llama.py"))["write_chats"]
    make_model_dir(tmp_path / ".demo" / "model", max_position_embeddings=128)
    assert f"{chats(tmp_path / '.demo' / 'chats.jsonl')} questions" in (ROOT / "README.md").read_text()
    assert status_of(*train[1:], "--device", "cpu") == 0
    assert "100 steps, loss" in capsys.readouterr().out
    assert status_of(*generate[1:], "--device", "cpu") == 0
    assert "tokens/s" in capsys.readouterr().err
