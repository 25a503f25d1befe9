"""Menus on disk: read back as they were written, and refused for anything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tunable import KEY, cheap_verification
from verispec.backends.cost import CostTable
from verispec.backends.protocol import View
from verispec.spec import skip_menu
from verispec.spec.skip_menu import BAYES, MenuEntry, MenuKey, SkipMenu, SkipProfile, read_menu, write_menu

HEAD = CostTable((1, 16), (0.25, 0.5), (0.0, 1e-9))
MENU = SkipMenu(
    profile=replace(cheap_verification(), head=HEAD),
    entries=(
        MenuEntry(View.without((1,)), 0.9, 0.8),
        MenuEntry(View.without((1, 3), (2,)), 0.5, 1 / 3, BAYES),
    ),
    search="both",
    num_tokens=384,
)


@pytest.mark.parametrize("menu", [MENU, replace(MENU, profile=cheap_verification(), entries=())])
def test_a_menu_comes_back_as_it_was(tmp_path: Path, menu: SkipMenu) -> None:
    path = write_menu(tmp_path / "new" / "folder", KEY, menu)
    assert read_menu(tmp_path / "new" / "folder", KEY) == menu
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "other",
    [
        MenuKey("another model", dict(KEY.fingerprint), dict(KEY.device)),
        MenuKey(KEY.model, {"kernels": "2"}, dict(KEY.device)),
        MenuKey(KEY.model, dict(KEY.fingerprint), {"cpu": "another"}),
        MenuKey(KEY.model, dict(KEY.fingerprint), {}),
    ],
)
def test_a_menu_is_for_one_model_fingerprint_and_device(tmp_path: Path, other: MenuKey) -> None:
    written = write_menu(tmp_path, KEY, MENU)
    assert read_menu(tmp_path, other) is None
    written.rename(other.path(tmp_path))  # not even under its name
    assert read_menu(tmp_path, other) is None
    assert read_menu(tmp_path, KEY) is None


def test_a_menu_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_menu(tmp_path, KEY, MENU)
    monkeypatch.setattr(skip_menu, "FORMAT", skip_menu.FORMAT + 1)
    assert read_menu(tmp_path, KEY) is None
    path.rename(KEY.path(tmp_path))
    assert read_menu(tmp_path, KEY) is None


def test_a_truncated_menu_is_refused(tmp_path: Path) -> None:
    path = write_menu(tmp_path, KEY, MENU)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert read_menu(tmp_path, KEY) is None
    path.write_bytes(whole)
    assert read_menu(tmp_path, KEY) == MENU


def _set(*path: Any, to: Any) -> Any:
    """A change of one value in the file."""

    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        if to is ...:
            del data[path[-1]]
        else:
            data[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("profile", to=...),
        _set("entries", to=7),
        _set("entries", 0, "attention", to=["x"]),
        _set("entries", 0, "agreement", to=1.5),
        _set("entries", 0, "agreement", to=None),
        _set("entries", 1, "sampled_agreement", to=-0.1),
        _set("entries", 1, "mlp", to=...),
        _set("profile", "full", "base", to=[1.0]),
        _set("profile", "mlp", "base", 0, to=-1.0),
        _set("profile", "attention", "base", 0, to=float("inf")),
        _set("profile", "attention", "per_context_token", 0, to=float("nan")),
        _set("profile", "mlp", "shapes", to=[1, 8]),
        _set("profile", "head", to="x"),
        _set("num_tokens", to="many"),
        _set("search", to=...),
    ],
)
def test_a_menu_that_makes_no_sense_is_refused(tmp_path: Path, change: Any) -> None:
    path = write_menu(tmp_path, KEY, MENU)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    assert read_menu(tmp_path, KEY) is None


@pytest.mark.parametrize("rubbish", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"format": 1}'])
def test_rubbish_is_refused(tmp_path: Path, rubbish: bytes) -> None:
    KEY.path(tmp_path).write_bytes(rubbish)
    assert read_menu(tmp_path, KEY) is None
    KEY.path(tmp_path).unlink()
    KEY.path(tmp_path).mkdir()
    assert read_menu(tmp_path, KEY) is None


@pytest.mark.parametrize("broken", ["write_text", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_writing_is_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, error: type[BaseException]
) -> None:
    """Interrupted at either step, the old menu is still there and nothing else is."""
    path = write_menu(tmp_path, KEY, MENU)

    def half(self: Path, *arguments: Any, **more: Any) -> None:
        if broken == "write_text":
            self.write_bytes(b"half a fi")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, broken, half)
        with pytest.raises(error):
            write_menu(tmp_path, KEY, replace(MENU, num_tokens=1))
    assert read_menu(tmp_path, KEY) == MENU
    assert list(tmp_path.iterdir()) == [path]


def test_a_step_counts_as_what_plain_decoding_pays_for_it() -> None:
    """Where one row costs more than two, one row is decoded as two: that it is dear is no gain of drafting."""
    flat = (0.0, 0.0, 0.0)
    full = CostTable((1, 2, 16), (1.5, 1.0, 3.0), flat)
    parts = (CostTable((1, 2, 16), (0.01, 0.01, 0.01), flat),) * 2
    c, v = SkipProfile(full, *parts).ratios(View.without((1, 2)), draft_len=1)
    assert (c, v) == (pytest.approx(0.98), 1.0)
    dear = CostTable((1, 4, 16), (1.5, 1.0, 3.0), flat)  # further off, padding is no option
    parts = (CostTable((1, 4, 16), (0.01, 0.01, 0.01), flat),) * 2
    assert SkipProfile(dear, *parts).ratios(View(), draft_len=3) == (1.0, pytest.approx(1 / 1.5))
