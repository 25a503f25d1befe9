"""A loaded model: what is looked for when it is loaded, and what is left when it is dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.skipping import SOME_SKIPPED, menu_of
from tests.support.tiny_llm import write_model
from verispec import runtime
from verispec.backends.options import BackendOptions
from verispec.backends.protocol import Backend
from verispec.backends.select import default_backend
from verispec.cli import options
from verispec.errors import InputError
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


@pytest.fixture
def looking_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether backends that are loaded look drafts up by themselves."""
    make_backend = runtime.make_backend

    def put(looks_up: bool) -> None:
        def make(options: BackendOptions, *args: Any, **more: Any) -> Backend:
            backend = make_backend(options, *args, **more)
            backend.limits = replace(backend.limits, looks_up=looks_up)  # type: ignore[misc]
            return backend

        monkeypatch.setattr(runtime, "make_backend", make)

    return put


def test_a_request_for_a_rule_that_auto_cannot_have_gets_the_draft_model(
    model: Path, looking_up: Callable[[bool], None]
) -> None:
    """Unless it names a drafter; the control asks for no rule."""
    looking_up(True)
    with LLM(model, backend="numpy", draft_model=model) as llm:
        assert llm.chosen(None, None).method == "auto"
        assert llm.chosen(None, {"tree": "chain:3"}).method == "auto"
        assert llm.chosen(None, {"accept": "recursive"}).method == "model"
        assert llm.chosen(None, {"accept": "recursive", "method": "auto"}).method == "auto"


def default_drafter(model: Path, **options: Any) -> str:
    """Of requests that name none, which are served."""
    with LLM(model, backend="numpy", **options) as llm:
        plain = llm.generate([[1, 2, 3]], PARAMS, drafter="none")
        assert llm.generate([[1, 2, 3]], PARAMS)[0].digest == plain[0].digest
        return llm.chosen(None, None).method


@pytest.mark.parametrize("drafter", [None, "none", "suffix", "auto"])
@pytest.mark.parametrize("looks_up", [False, True])
def test_the_policy_chooses_by_default_where_the_backend_looks_up(
    model: Path, looking_up: Callable[[bool], None], looks_up: bool, drafter: str | None
) -> None:
    """A drafter that is named stays what it is."""
    looking_up(looks_up)
    expected = drafter or ("auto" if looks_up else "suffix")
    assert default_drafter(model, drafter=drafter) == expected


@pytest.mark.parametrize("looks_up", [False, True])
def test_a_draft_model_is_used_by_default(model: Path, looking_up: Callable[[bool], None], looks_up: bool) -> None:
    """By the policy where the backend looks up; but where probabilities judge, by itself: `auto` has none."""
    looking_up(looks_up)
    assert default_drafter(model, draft_model=model) == ("auto" if looks_up else "model")
    assert default_drafter(model, draft_model=model, drafter="suffix") == "suffix"
    with LLM(model, backend="numpy", draft_model=model, accept="rejection") as llm:
        assert llm.chosen(None, None).method == "model"
        llm.generate([[1, 2, 3]], replace(PARAMS, temperature=1.0, deterministic=False))


def test_a_wrong_drafter_is_refused_before_weights_are_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "make_backend", lambda *args, **more: pytest.fail("weights are read"))
    for drafter, message in (("magic", "unknown drafter 'magic'"), ("model", "drafter model needs a draft_model")):
        with pytest.raises(InputError, match=message):
            LLM(model, backend="numpy", drafter=drafter)


@pytest.mark.parametrize("looks_up", [False, True])
def test_the_command_line_leaves_the_default_to_the_model(
    model: Path, looking_up: Callable[[bool], None], looks_up: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what has no effect with it."""
    looking_up(looks_up)
    loading, forced = options.Loading(model=str(model), backend="numpy"), options.Drafting(force=True)
    with options.load_llm(loading, forced) as llm:
        assert forced.method(llm) == ("auto" if looks_up else "suffix")
        assert replace(forced, drafter="none").method(llm) == "none"
        assert llm._force
    assert capsys.readouterr().err == "note: --force has no effect with --drafter suffix\n" * (not looks_up)
    second = options.Drafting(draft_model=str(model), force=True)
    with options.load_llm(loading, second) as llm:
        assert second.method(llm) == "model"
    assert capsys.readouterr().err == ""


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
