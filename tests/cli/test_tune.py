"""`verispec tune`, on a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.support import tiny_llm
from verispec.llm import LLM
from verispec.model import cache_dir
from verispec.spec.skip_menu import read_menu
from verispec.tuning import Search, TuneOptions, quick_menu, tune, tuner

pytestmark = pytest.mark.slow

NUM_LAYERS = 5
CONFIG = replace(tiny_llm.CONFIG, num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    with tiny_llm.loaded(tiny_llm.write_model(folder / "tiny.gguf", CONFIG), folder, backend="numpy") as loaded:
        yield loaded


@pytest.fixture
def tiny_cli(bare_cli: Cli, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Commands on that model, with a cache of their own and a search that takes no time."""
    small = {"search_tokens": 16, "report_tokens": 16, "width": 2, "floor": 0.0}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("verispec.llm.LLM", lambda **options: llm)
    monkeypatch.setattr("verispec.tuning.TuneOptions", lambda **options: TuneOptions(**{**small, **options}))
    return bare_cli


def test_tune_prints_a_table_and_a_verdict_and_keeps_the_menu(tiny_cli: Cli, llm: LLM) -> None:
    done = tiny_cli("tune")
    assert done.code == 0, done.err
    table, verdict = done.out.rstrip().rsplit("\n\n", 1)
    assert verdict.startswith("layer skipping is predicted to give")
    assert f"Sets of {2 * NUM_LAYERS} sub-layers (search: greedy)" in table
    menu = read_menu(cache_dir(), llm.menu_key)
    assert menu is not None
    assert len(menu.entries) == 5  # half of ten
    assert len(table.splitlines()) == 5 + 5
    again = tiny_cli("tune")
    assert again.out == done.out  # the profile is kept, so all of it comes out again
    assert read_menu(cache_dir(), llm.menu_key) == menu


def test_the_comparison_of_two_runs_can_fail(tiny_cli: Cli, llm: LLM) -> None:
    """What is timed anew differs, in seconds that are not rounded: so the menus above are one that was kept."""
    tiny_cli("tune")
    kept = read_menu(cache_dir(), llm.menu_key)
    tiny_cli("tune", "--fresh")
    fresh = read_menu(cache_dir(), llm.menu_key)
    assert kept is not None
    assert fresh is not None
    assert fresh.profile != kept.profile


def test_json(tiny_cli: Cli, llm: LLM) -> None:
    found = tiny_cli("tune", "--json").json()
    assert found["search"] == "greedy"
    assert len(found["entries"]) == 5
    assert sum(entry["best"] for entry in found["entries"]) == 1
    assert found["profile_hash"] == llm.profile
    assert {"rows", "seconds", "attention", "mlp", "head"} == set(found["profile"][0])


def test_bayes_and_a_plot(tiny_cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "menu.PNG"
    done = tiny_cli("tune", "--search", "both", "--trials", "12", "--plot", str(picture), "--json")
    assert done.code == 0, done.err
    assert {"greedy", "bayes"} == {entry["found_by"] for entry in done.json()["entries"]}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"plot in {picture}" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--search", "luck"], "--search"),
        (["--search", "bayes", "--trials", "0"], "--trials"),
        (["--search", "bayes", "--trials", "many"], "--trials"),
        (["--trials", "50"], "--trials needs --search bayes or both"),
        (["--plot", "menu.jpg"], "--plot menu.jpg: the name of a plot ends in .png"),
        (["--plot", "/no/such/folder/menu.png"], "--plot /no/such/folder/menu.png: is not a file that can be written"),
        (["prompt"], "unexpected extra argument"),
    ],
)
def test_what_tune_refuses(tiny_cli: Cli, llm: LLM, arguments: list[str], words: str) -> None:
    done = tiny_cli("tune", *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert read_menu(cache_dir(), llm.menu_key) is None


@pytest.mark.parametrize(
    ("package", "arguments"), [("optuna", ["--search", "bayes"]), ("matplotlib", ["--plot", "menu.png"])]
)
def test_a_missing_package_is_named_before_any_work(
    tiny_cli: Cli, monkeypatch: pytest.MonkeyPatch, package: str, arguments: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("verispec.llm.LLM", None)
    done = tiny_cli("tune", *arguments)
    assert (done.code, done.out) == (2, "")
    assert f"{package}: pip install 'verispec[tune]'" in done.err


def test_ctrl_c_keeps_the_old_menu_and_the_model_usable(
    tiny_cli: Cli, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate("abc", drafter="none")[0].digest
    tiny_cli("tune")
    kept = read_menu(cache_dir(), llm.menu_key)

    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "greedy", interrupted)
    done = tiny_cli("tune")
    assert (done.code, done.out) == (130, "")
    assert read_menu(cache_dir(), llm.menu_key) == kept is not None
    assert [p.suffix for p in cache_dir().iterdir()] == [".json"]
    assert llm.generate("abc", drafter="none")[0].digest == expected


def test_a_cache_that_cannot_be_written_is_found_before_any_work(
    tiny_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("verispec.llm.LLM", None)
    done = tiny_cli("tune")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert str(tmp_path / "file") in done.err


def test_help_says_what_it_is_for(bare_cli: Cli) -> None:
    text = bare_cli("tune", "--help").out
    for part in ("--search", "--trials", "--plot", "--fresh", "--json", "--backend", "--threads", "--weights"):
        assert part in text


def test_the_library_does_the_same(llm: LLM, tmp_path: Path) -> None:
    """What a program calls: the stored menu, a quick one where there is none, a full one on demand."""
    subject, key = tuner.Subject.of(llm), llm.menu_key
    options = TuneOptions(search=Search.QUICK, search_tokens=16, report_tokens=16, width=1, floor=0.0)
    with llm.separate_engine():
        quick = quick_menu(subject, key=key, cache_dir=tmp_path, options=options)
        assert quick_menu(subject, key=key, cache_dir=tmp_path) == quick
        full = tune(subject, key=key, cache_dir=tmp_path, options=replace(options, search=Search.GREEDY))
    assert read_menu(tmp_path, key) == full
    assert full.profile == quick.profile
