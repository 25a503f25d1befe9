"""Hugging Face ids: what is asked for, and every way in which it can fail, without a network."""

import errno
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from verispec.errors import FetchError, InputError
from verispec.model import resolve
from verispec.model.hf_hub import HUB_MODELS, is_hub_id
from verispec.model.hub import REGISTRY, cached_path, known_models


def refusal(kind: type[Exception], message: str = "") -> Exception:
    """An exception of the library's without the HTTP response that its constructor wants."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def offer(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[Any]:
    calls: list[Any] = []

    def snapshot_download(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_an_id_becomes_the_folder_of_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = offer(monkeypatch, str(tmp_path / "snapshot"))
    seen: list[Any] = []
    assert resolve("org/some-Model.v1", progress=lambda *event: seen.append(event)) == tmp_path / "snapshot"
    ((args, options),) = calls
    assert args == ("org/some-Model.v1",)
    assert seen == [("downloading", 0, 1), ("downloading", 1, 1)]

    wanted = huggingface_hub.utils.filter_repo_objects(
        ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
         "tokenizer.json", "chat_template.jinja", "modeling.py", "pytorch_model.bin", "model.pt", "model.gguf",
         "original/params.json", "onnx/model.safetensors", "consolidated.safetensors", "README.md"],
        allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"],
    )  # fmt: skip
    assert list(wanted) == [
        "config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "chat_template.jinja",
    ]  # fmt: skip


def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = offer(monkeypatch, "nowhere")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name") == Path("org/name")
    assert calls == []


@pytest.mark.parametrize(
    "name",
    ["name", "a/b/c", "/a", "a/", "./a", "../a", "a/..", ".a/b", "a/.b", "a b/c", "a/b\n", "a/b:c", "a\\b", "~/a",
     "é/b", "models/x.gguf", "models/x.safetensors", "a--b/c", "a..b/c", "a/" + "b" * 100, "-a/b", "a/b\0", ""],
)  # fmt: skip
def test_what_is_no_id_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = offer(monkeypatch, "nowhere")
    assert not is_hub_id(name)
    with pytest.raises(InputError, match="neither an existing path nor a known model"):
        resolve(name)
    with pytest.raises(InputError):
        resolve(Path("org/name"))  # a path is a path
    assert calls == []


@pytest.mark.parametrize(
    ("error", "kind", "named"),
    [
        (refusal(errors.GatedRepoError), FetchError, "grants access on request"),
        (refusal(errors.RepositoryNotFoundError), InputError, "'org/name' is neither an existing path nor a model"),
        (errors.LocalEntryNotFoundError("x"), FetchError, "offline"),
        (errors.OfflineModeIsEnabled("x"), FetchError, "offline"),
        (refusal(errors.HfHubHTTPError, "503 Server Error\nrequest 7"), FetchError, "org/name .*: 503 Server Error"),
        (OSError(errno.ENOSPC, "No space left on device"), FetchError, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), FetchError, "Permission denied"),
        (ValueError(), FetchError, "ValueError"),
        (RuntimeError("a\nb\n" * 1000), FetchError, ": a"),
        (RuntimeError("x" * 5000), FetchError, "xxx"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_failures_become_one_sentence(
    error: Exception, kind: type[Exception], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, error)
    with pytest.raises(kind, match=named) as caught:
        resolve("org/name")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_without_the_package_there_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="pip install huggingface_hub"):
        resolve("org/name")


def test_an_interrupt_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name")


def test_known_models_are_found_in_the_library_cache_once_their_weights_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    name = next(iter(HUB_MODELS))
    assert is_hub_id(name)
    assert cached_path(name) is None
    repository = tmp_path / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").touch()
    assert cached_path(name) is None
    (snapshot / "model.safetensors").touch()
    assert cached_path(name) == snapshot
    assert list(known_models()) == [*REGISTRY, *HUB_MODELS]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert cached_path(name) is None
