"""A path in the home of a user who is unknown is a path that is not there."""

from pathlib import Path
from typing import Any

import pytest

from cli.command_line import status_of

PATH = "~nobody-of-that-name/model"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", PATH],
        ["inspect", PATH],
        ["generate", PATH, "--prompt", "a", "--device", "cpu"],
        ["serve", PATH, "--device", "cpu"],
        ["train", "--set", f"model.path={PATH}", "--set", "data.path=d.txt"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_home_of_an_unknown_user_is_no_traceback(
    arguments: list[str], capsys: Any, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.txt").write_text("text\n")
    assert status_of(*arguments) == 2
    assert PATH in capsys.readouterr().err
