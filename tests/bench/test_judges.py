"""The judges' exit code: what was found, and what could not be run."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("judges")

    @contextmanager
    def serving(*options: str) -> Iterator[str]:
        yield "http://nowhere"

    def missing(bench: Any) -> Any:
        raise module.UnavailableError("it is elsewhere")

    monkeypatch.setattr(module, "serving", serving)
    outcomes = {"good": True, "bad": False}
    kinds: dict[str, Any] = {
        name: lambda bench, g=is_good: module.Outcome("1", "said", g) for name, is_good in outcomes.items()
    }
    monkeypatch.setattr(module, "JUDGES", {**kinds, "missing": missing})
    return module


@pytest.mark.parametrize(("options", "code"), [
    (("--only", "good"), 0),
    (("--only", "good", "bad"), 1),
    (("--only", "good", "missing"), 1),
    (("--only", "good", "missing", "--allow-missing"), 0),
    (("--only", "bad", "missing", "--allow-missing"), 1),
])  # fmt: skip
def test_a_judge_that_was_not_run_is_not_good(
    judges: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], code: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["judges.py", "--folder", str(tmp_path), *options])
    assert judges.main() == code
    assert ("not run: it is elsewhere" in capsys.readouterr().out) == ("missing" in options)


def test_only_what_is_not_served_is_excused(judges: Any) -> None:
    names = {
        "tests/api_resources/test_responses.py::TestResponses::test_method_create_overload_1[loose]": False,
        "tests/api_resources/test_responses.py::TestResponses::test_method_retrieve_overload_1[loose]": True,
        "tests/api_resources/chat/test_completions.py::TestCompletions::test_method_create_overload_1": False,
        "tests/api_resources/chat/test_completions.py::TestCompletions::test_raw_response_list": True,
    }
    assert {name: bool(re.search(judges.NOT_SERVED, name)) for name in names} == names
    assert re.search(judges.LLAMA_ONLY, "unit/test_security.py::test_correct_api_key")
    assert not re.search(judges.LLAMA_ONLY, "unit/test_security.py::test_incorrect_api_key[None]")
