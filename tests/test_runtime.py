"""A loaded model: what is looked for when it is loaded, and what is left when it is dropped."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from tests.support.skipping import SOME_SKIPPED, menu_of
from tests.support.tiny_llm import write_model
from verispec import runtime
from verispec.backends.select import default_backend
from verispec.cli import options
from verispec.llm import LLM
from verispec.model import cache_dir
from verispec.model.file_digest import FileDigest
from verispec.spec.skip_menu import write_menu
from verispec.types import SamplingParams

PARAMS = SamplingParams(max_tokens=4, seed=1)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_model(tmp_path / "tiny.gguf")


def test_skip_sets_are_found_at_load_and_never_in_a_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest_of = FileDigest.of

    def of(path: Path) -> FileDigest:
        read.append(path)
        return digest_of(path)

    monkeypatch.setattr(FileDigest, "of", of)
    with LLM(model, backend="numpy", drafter="auto") as llm:
        for drafter in ("auto", "skip"):
            llm.generate([[1, 2, 3]], PARAMS, drafter=drafter)
        assert llm.skip_menu() is None
        assert not read, "there is no menu, so nothing need be hashed"
        write_menu(cache_dir(), llm.menu_key, menu_of(SOME_SKIPPED))
    read.clear()
    with LLM(model, backend="numpy", drafter="auto") as llm:
        assert read == [model]
        assert llm.skip_menu() is not None
        for drafter in ("auto", "skip"):
            llm.generate([[1, 2, 3]], PARAMS, drafter=drafter)
        assert read == [model]


@pytest.mark.parametrize("lost", ["the CUDA backend is missing: this machine has none", None])
def test_what_is_lost_with_the_default_backend_is_logged(
    model: Path, lost: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once; and not of a backend that was named, nor where the command line has said it."""
    monkeypatch.setattr(runtime, "default_backend", lambda: "numpy")
    monkeypatch.setattr(runtime, "what_is_lost", lambda name: lost if name == "numpy" else None)
    with LLM(model, drafter="none"):
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [lost] * bool(
            lost
        )
    caplog.clear()
    with LLM(model, backend="numpy", drafter="none"):
        assert not caplog.records
    assert options.llm_arguments(options.Loading(), None, quiet=True)["backend"] == default_backend()


def test_a_model_that_is_dropped_ends_its_thread(model: Path) -> None:
    llm = LLM(model, backend="numpy", drafter="none")
    llm.generate([[1, 2, 3]], PARAMS)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    thread, dropped = llm.thread._thread, weakref.ref(llm)
    del llm, stream
    gc.collect()
    assert dropped() is None
    thread.join(timeout=30)
    assert not thread.is_alive()
