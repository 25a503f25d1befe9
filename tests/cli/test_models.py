"""`verispec models`, in a cache folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from verispec.model.hf_hub import HUB_MODELS
from verispec.model.hub import REGISTRY

NAME = "smollm2-135m"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the default model would be, in empty caches."""
    monkeypatch.setattr("verispec.model.hub.cached_snapshot", lambda model: None)
    monkeypatch.setattr("verispec.model.hub.cache_dir", lambda: tmp_path)
    return tmp_path / REGISTRY[NAME].file_name


def fill(path: Path, nbytes: int = REGISTRY[NAME].nbytes) -> None:
    with path.open("wb") as file:
        file.truncate(nbytes)  # sparse: the right size is what tells a whole file


def test_from_list_to_remove(bare_cli: Cli, cached: Path) -> None:
    (default, *larger) = bare_cli("models", "list").out.splitlines()
    assert default.split() == [NAME, "0.10", "GB", "Apache-2.0", "from", "PyPI", "not", "fetched"]
    assert [line.split()[0] for line in larger] == list(HUB_MODELS)
    assert all(line.endswith("Apache-2.0  from the hub  not fetched") for line in larger)
    fill(cached)
    assert f"here: {cached}" in bare_cli("models", "list").out
    assert bare_cli("models", "path", NAME).out == f"{cached}\n"
    assert bare_cli("models", "pull").out == f"{cached}\n"
    assert bare_cli("models", "remove", NAME).out == f"removed {cached} (98.4 MB)\n"
    assert not cached.exists()


def test_alone_it_lists(bare_cli: Cli, cached: Path) -> None:
    assert bare_cli("models").out == bare_cli("models", "list").out
    assert bare_cli("models", "list", NAME).code == 2


def test_a_damaged_file_can_be_removed(bare_cli: Cli, cached: Path) -> None:
    fill(cached, 5)
    assert bare_cli("models", "path", NAME).code == 2
    assert bare_cli("models", "remove", NAME).code == 0
    assert not cached.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["remove", NAME], f"{NAME} is not in the cache"),
        (["path", NAME], f"`verispec models pull {NAME}` fetches it"),
        (["remove", "nope"], "'nope' is not a known model; known models: smollm2-135m"),
        (["remove", "Qwen/Qwen2.5-1.5B-Instruct"], "`hf cache` removes it"),
        (["path", "Qwen/Qwen2.5-1.5B-Instruct"], "pull Qwen/Qwen2.5-1.5B-Instruct` fetches it"),
        (["pull", "/"], "'/' is not a known model"),
        (["remove"], "missing argument: the NAME"),
        (["destroy"], "ACTION must be list or pull or remove or path, not 'destroy'"),
    ],
)
def test_mistakes(bare_cli: Cli, cached: Path, arguments: list[str], words: str) -> None:
    done = bare_cli("models", *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_no_permission(bare_cli: Cli, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    fill(cached)
    monkeypatch.setattr(Path, "unlink", refuse)
    done = bare_cli("models", "remove", NAME)
    assert (done.code, done.out, done.err) == (2, "", f"verispec: {cached}: Permission denied\n")
