"""Options and fixtures that more than one folder of tests needs."""

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import scale
from verispec.backends import native_library
from verispec.errors import InputError
from verispec.llm import LLM
from verispec.model import hub

HIDDEN = "hidden-by-bare-"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shots", help="a folder to keep pictures of the page in")
    parser.addoption("--need-browser", action="store_true", help="without a browser, tests of the page fail")
    parser.addoption("--times", type=float, default=1, help="run this many times as many generated cases")
    parser.addoption("--cases", type=int, help="of a test with many parameters run this many, spread evenly")
    parser.addoption("--bare", action="store_true", help="hide the models and the kernels; skip what looks for them")


def pytest_configure(config: pytest.Config) -> None:
    scale.configure(config.getoption("--times"))
    if config.getoption("--bare"):
        native_library.why_missing = lambda: HIDDEN
        native_library.load = _hidden  # type: ignore[assignment]
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix=HIDDEN)
        os.environ["CXX"] = HIDDEN
    if kernels := os.environ.get("VERISPEC_TEST_KERNELS"):  # another build of them: `make native-asan`
        native_library.PATH = Path(kernels).resolve()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (most := config.getoption("--cases")):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for cases in tests.values() for item in cases[:: -max(1, len(cases) // most)][:most]}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _hidden(path: Path) -> Any:
    raise InputError(HIDDEN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that finds something missing because it is hidden is skipped: which ones those are cannot go stale."""
    report = yield
    if report.failed and call.excinfo is not None and HIDDEN in str(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, HIDDEN)
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if most of the suite was skipped: then it says nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--bare") and reporter is not None:
        passed, skipped = (len(reporter.stats.get(outcome, ())) for outcome in ("passed", "skipped"))
        if passed < skipped:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model in the cache. Tests never download, and a missing model is a failure, not a skip."""
    path = hub.cache_dir() / hub.REGISTRY["smollm2-135m"].file_name
    if not path.is_file():
        pytest.fail(f"{path} is missing: fetch the default model once before running the tests")
    return path


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """For tests that count on native being the default backend."""
    if reason := native_library.why_missing():
        pytest.fail(f"the native kernels are missing: {reason}")


@pytest.fixture(scope="session")
def smollm2_numpy(smollm2_path: Path) -> Iterator[LLM]:
    """The same on the numpy backend, in float32."""
    with LLM(smollm2_path, drafter="none", backend="numpy") as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[LLM]:
    """The default model, loaded once for all tests. It drafts nothing unless a call names a drafter."""
    with LLM(smollm2_path, drafter="none") as llm:
        yield llm
