"""The hub: a model card names the repository; what is sent, and what is said without a network or a
login.
"""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from nanotrain.cli.main import main
from nanotrain.errors import EnvironmentFault
from nanotrain.interop.hf import hub as push
from nanotrain.interop.hf.hub import CARD_FILE, model_card, name_card, push_folder
from tests.model.building import LLAMA


class Hub:
    """Notes what is asked of it."""

    calls: list[tuple[str, dict[str, Any]]]

    def create_repo(self, name: str, **options: Any) -> None:
        self.calls.append((name, options))

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
        self.calls.append((repo_id, {"folder_path": folder_path}))


def test_the_folder_is_uploaded_to_a_private_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    hub.calls = []
    monkeypatch.setattr(push, "go_offline_if_unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    assert push_folder(tmp_path, "me/model").endswith("/me/model")
    assert hub.calls == [
        ("me/model", {"private": True, "exist_ok": True}),
        ("me/model", {"folder_path": tmp_path}),
    ]

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("not logged in")

    monkeypatch.setattr(hub, "create_repo", refuse)
    with pytest.raises(
        EnvironmentFault, match="cannot be uploaded to me/model: not logged in.*hf auth login"
    ):
        push_folder(tmp_path, "me/model")


def test_without_a_network_the_command_for_later_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert push_folder(tmp_path, "me/model").endswith(f"hf upload me/model {tmp_path}")


def test_a_wrong_name_is_an_error_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "checkpoint",
        "export-hf",
        str(tmp_path / "run"),
        str(tmp_path / "out"),
        "--push",
        "a/b/c",
    ]
    assert main(line) == 2 and "write --push OWNER/NAME" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_card_names_the_repository_and_only_what_is_there(
    tmp_path: Path, has_tokenizer: bool
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    card = model_card(LLAMA, name="out", family="llama", dtype="fp32", has_tokenizer=has_tokenizer)
    (folder / CARD_FILE).write_text(card)
    name_card(folder, "me/model")
    text = (folder / CARD_FILE).read_text()
    assert text == model_card(
        LLAMA, name="me/model", family="llama", dtype="fp32", has_tokenizer=has_tokenizer
    )
    assert (
        text.count('from_pretrained("me/model")') == 1 + has_tokenizer and "\n# me/model\n" in text
    )
    assert ("Tokenizer" in text) == has_tokenizer and "out" not in text
