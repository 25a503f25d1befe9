"""The program that makes a GPU fail, on a CPU that stands in for one: what it demands can be met, and can be missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from tests.backends.cuda import backend_check  # noqa: E402
from tests.backends.cuda import failures_check as failures  # noqa: E402
from tests.support.cuda_stand_in import StandIn, StandInEvent  # noqa: E402
from verispec.backends.cuda.backend import CudaBackend  # noqa: E402
from verispec.backends.cuda.steps import StepKernels  # noqa: E402

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def failed() -> Iterator[list[str]]:
    """The list of the checks, as it was before."""
    before = backend_check.FAILED[:]
    backend_check.FAILED.clear()
    yield backend_check.FAILED
    backend_check.FAILED[:] = before


class Lost(StandIn):
    """Whoever waits for it hears that it is lost, once it is."""

    is_lost = False

    def event(self) -> StandInEvent:
        device = self

        class Event(StandInEvent):
            def synchronize(self) -> None:
                if device.is_lost:
                    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel")

        return Event()


def test_a_lost_device_ends_everything(failed: list[str]) -> None:
    device = Lost()
    failures.check_lost(device, lambda backend: setattr(device, "is_lost", True))
    assert failed == []


def test_a_device_that_is_not_lost_is_noticed(failed: list[str]) -> None:
    """The control; slots that are nobody's are written where sequences have theirs."""
    tables = []

    def write(backend: CudaBackend) -> None:
        failures.write_wild_slots(backend)
        tables.append(backend._state.inputs.table.clone())
        backend._state.inputs.table[1:, : len(failures.WILD)] = 2

    failures.check_lost(StandIn(), write)
    assert [name for name in failed if name.startswith("a later")] == [
        "a later request that was not refused", "a later pass that was not refused",
    ]  # fmt: skip
    assert "requests that did not end with the GPU's failure" in failed
    assert (tables[0][1:, :4] == torch.tensor(failures.WILD)).all()


@pytest.mark.parametrize("runs_out", [True, False])
def test_memory_that_runs_out_ends_one_pass(runs_out: bool, failed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    edit = StepKernels.edit

    @contextmanager
    def full() -> Iterator[None]:
        def fails(*args: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(StepKernels, "edit", fails if runs_out else edit)
        yield
        monkeypatch.setattr(StepKernels, "edit", edit)

    failures.check_memory(lambda: backend_check.make("llama", StandIn()), full, 8)
    assert failed == ([] if runs_out else ["a pass without memory that did not fail"] * 2)
