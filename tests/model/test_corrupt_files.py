"""Thousands of broken model files: each works or is refused in a sentence, within a second and a fitting memory.

The cases are generated in tests/support/broken_*.py: truncations at every byte of a header, every integer of a GGUF
file wrong in a dozen ways, every JSON value of a folder too, and chat templates that never end.
"""

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support import broken_folders, broken_gguf, broken_templates
from tests.support.broken_files import PEAK_FLOOR_NBYTES, Bench, Case, Outcome, complaints, observe, open_fully
from tests.support.scale import thinned
from verispec.errors import ModelFileError
from verispec.model import open_checkpoint

# What each module is known to generate; the claim of 2,000 cases in all is kept with a wide margin.
AT_LEAST: dict[ModuleType, int] = {broken_gguf: 9_000, broken_folders: 7_000, broken_templates: 50}


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("module", AT_LEAST, ids=lambda module: module.__name__.rsplit("_", 1)[1])
def test_every_broken_file_works_or_is_refused_in_a_sentence(
    module: ModuleType, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cases: list[Case] = list(module.cases())
    different = {hash((case.target, *sorted(case.files.items()))) for case in cases}
    assert len(different) >= AT_LEAST[module]  # different files, not merely different names
    request.getfixturevalue("traced")  # from here on: tracing slows the generators down
    bench = Bench(tmp_path)
    assert [complaint for case in thinned(cases) for complaint in bench.judge(case)] == []


def test_there_are_at_least_2000_cases() -> None:
    assert sum(AT_LEAST.values()) >= 2_000


def work() -> None:
    pass


def fail(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def allocate() -> None:
    np.ones(2 * PEAK_FLOOR_NBYTES, dtype=np.uint8)


def spin() -> None:
    start = time.process_time()
    while time.process_time() - start < 2.1:
        pass


@pytest.mark.parametrize(
    ("action", "named"),
    [
        (work, None),
        (fail(ModelFileError("FOLDER/x: broken")), None),
        (fail(KeyError("x")), "KeyError"),
        (fail(MemoryError()), "MemoryError"),
        (fail(RecursionError("too deep")), "RecursionError"),
        (fail(ModelFileError("broken")), "does not name the file"),
        (fail(ModelFileError("FOLDER/x: \n\n\n")), "not a line or two"),
        (fail(ModelFileError("FOLDER/x: \x1b[2J")), "not a line or two"),
        (fail(ModelFileError("FOLDER/x: " + "y" * 5000)), "not a line or two"),
        (allocate, "allocates"),
        (spin, "takes"),
    ],
)  # fmt: skip
def test_control_the_judge_notices(action: Callable[[], None], named: str | None, traced: None) -> None:
    found = complaints(observe(action), folder=Path("FOLDER"), nbytes=100)
    assert [named in complaint for complaint in found if named] == ([True] if named else [])


def test_control_a_wrong_verdict_is_noticed(tmp_path: Path, traced: None) -> None:
    sound = broken_gguf.model(broken_gguf.BYTE_LEVEL).data
    bench = Bench(tmp_path)
    assert bench.judge(Case("sound", "a.gguf", {"a.gguf": sound}, must_work=True)) == []
    assert bench.judge(Case("sound", "a.gguf", {"a.gguf": sound}, must_fail=True)) == ["sound: accepted"]
    (complaint,) = bench.judge(Case("cut", "a.gguf", {"a.gguf": sound[:-40]}, must_work=True))
    assert "cut: refused" in complaint


def test_an_outcome_within_its_bounds_is_fine() -> None:
    folder = Path("FOLDER")
    assert complaints(Outcome(None, 0.5, PEAK_FLOOR_NBYTES), folder=folder, nbytes=0) == []
    assert complaints(Outcome(None, 0.5, PEAK_FLOOR_NBYTES + 1), folder=folder, nbytes=0) != []
    assert complaints(Outcome(None, 2.5, 0), folder=folder, nbytes=0) != []


@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_weights_that_are_not_finite_are_named_by_file_tensor_and_index(
    value: float, shown: str, tmp_path: Path
) -> None:
    arrays = broken_gguf.weights(6)
    arrays["token_embd.weight"][3, 5] = value
    arrays["token_embd.weight"][4, 0] = np.nan  # the first one is named
    path = tmp_path / "a.gguf"
    path.write_bytes(broken_gguf.build(list(broken_gguf.metadata(broken_gguf.BYTE_LEVEL).items()), arrays).data)
    with open_checkpoint(path) as checkpoint:
        checkpoint.tensor("final_norm")
        with pytest.raises(ModelFileError) as caught:
            checkpoint.tensor("embed")
    assert str(caught.value) == f"{path}: tensor 'token_embd.weight' holds {shown} at index [3, 5]"


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match=r"pipe\.gguf: neither a file nor a folder"):
        open_fully(tmp_path / "pipe.gguf")


def test_a_shard_with_a_nan_is_named(tmp_path: Path) -> None:
    (sound,) = (case for case in broken_folders.cases() if case.name == "sharded, sound")
    for name, content in sound.files.items():
        (tmp_path / name).write_bytes(content)
    shard = tmp_path / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + np.float32(np.nan).tobytes())
    with pytest.raises(ModelFileError) as caught:
        open_fully(tmp_path)
    assert str(caught.value).startswith(f"{shard}: tensor 'model.layers.0.")
    assert "holds nan at index [" in str(caught.value)
