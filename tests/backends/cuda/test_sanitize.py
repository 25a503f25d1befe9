"""The program that compute-sanitizer watches, where a CPU can stand in for the GPU; and that it has every kernel."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.backends.cuda import backend_check, case_digests, draw_check  # noqa: E402
from tests.backends.cuda import sanitize_check as sanitize  # noqa: E402
from tests.support import cuda_emulated  # noqa: E402
from tests.support.cuda_stand_in import EmulatedDraws, StandIn  # noqa: E402
from verispec.backends.cuda import tiny  # noqa: E402

pytestmark = pytest.mark.cuda


class Emulated(StandIn):
    """A device whose draws are by the kernels' own sources, too."""

    def draws(self, vocab_size: int, rows: int) -> EmulatedDraws:
        return EmulatedDraws(vocab_size, rows)


@pytest.fixture(autouse=True)
def failed() -> list[str]:
    """The list of the checks, as it was before."""
    before = backend_check.FAILED[:]
    backend_check.FAILED.clear()
    yield backend_check.FAILED
    backend_check.FAILED[:] = before


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found, launch = set(), cuda_emulated.launch

    def recorded(source: str, name: str, *args: object, **more: object) -> None:
        found.add(f"{source}:{name}")
        launch(source, name, *args, **more)

    monkeypatch.setattr(cuda_emulated, "launch", recorded)
    return found


def test_every_source_belongs_to_a_section() -> None:
    sources = [source for section in sanitize.SECTIONS.values() for source in section.sources]
    in_graphs_alone = ["branch.cu"]
    assert sorted(sources + in_graphs_alone) == sorted(path.name for path in sanitize.SOURCES.glob("*.cu"))
    kernels = sanitize.kernels_of(sources)
    assert len(kernels) == sum((sanitize.SOURCES / s).read_text().count("__global__") for s in sources)


def test_rounds_launch_all_their_kernels_and_capture_nothing(launched: set[str], failed: list[str]) -> None:
    class Uncaptured(StandIn):
        def capture(self, work: object) -> None:
            raise AssertionError("this is for graphs")

    sanitize.check(["rounds"], Uncaptured(), launched)
    assert failed == []


def test_what_is_captured_is_checked_as_well(failed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(StandIn, "capture", lambda self, work: seen.append(work) or sanitize.Eager(self).capture(work))
    for name in ("check_children", "check_beside_prompts"):
        monkeypatch.setattr(sanitize, name, lambda device: None)
    monkeypatch.setattr(sanitize.trees_check, "check_trees", lambda *args, **how: None)
    sanitize.check(["graphs"], StandIn(), set())
    assert failed == []
    assert len(seen) > 10


def test_the_draws_own_source_gives_the_digest_of_the_case() -> None:
    rows, draws = case_digests.ROWS, EmulatedDraws(case_digests.VOCAB, case_digests.ROWS)
    parameters = draw_check.device_parameters(case_digests.draw_parameters(), "cpu")
    draws.draw(torch.from_numpy(case_digests.draw_logits()), parameters, rows, filters=True)
    found = torch.stack([draws.token_ids.float(), draws.logprobs], dim=1)
    assert tiny.digest(found.numpy()) == case_digests.DIGESTS["draws with filters"]


def test_the_kernels_of_draws_and_weighing(launched: set[str], failed: list[str]) -> None:
    """Without the long cases of draws, which have a test of their own; and the control: a kernel that is left out."""
    sanitize.check_advance(EmulatedDraws(320, 8), "cpu")
    sanitize.check(["weighing"], Emulated(), launched)
    assert failed == []
    assert "draw.cu:advance_rows" in launched
    sanitize.check(["weighing"], Emulated(), launched - {"weighing.cu:weigh_first"})
    assert failed == ["weighing: kernels that were not launched weighing.cu:weigh_first"]
