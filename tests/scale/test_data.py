"""A Ray Data job over 500 prompts, killed and started again: the bytes of one process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.scale.conftest import Farm
from tests.scale.data_job import NUM_PROMPTS, PARAMS, prompts, write_prompts
from tests.support.chat_model import write_chat_model
from verispec.llm import LLM
from verispec.ray.data import Answerer

PENDING = ".pending.parquet"
WORKERS = ("ray::MapWorker(", "ray::Read", "ray::Write")  # of a job


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Job:
    """The job in a folder, over any number of lives."""

    def __init__(self, farm: Farm, folder: Path, model: Path, keeper: str) -> None:
        write_prompts(folder / "in")
        self._farm = farm
        self._command = [
            sys.executable, "-m", "tests.scale.data_job", farm.address, str(model), str(folder), keeper
        ]  # fmt: skip
        self._out = folder / "out"

    def killed(self, has_enough: Callable[[], bool]) -> None:
        """Once it has enough: it stops by itself before it has everything."""
        job = subprocess.Popen([*self._command, "part"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_until(lambda: job.poll() is not None or has_enough())
            assert job.poll() is None
            assert self._farm.pids(*WORKERS)
        finally:
            job.kill()
            job.wait()
        _wait_until(lambda: not self._farm.pids(*WORKERS))

    def finished(self) -> None:
        subprocess.run([*self._command, "whole"], check=True, stdout=subprocess.DEVNULL, timeout=300)

    @property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self._out.glob("*.json")}

    @property
    def rows(self) -> list[str]:
        rows = (json.loads(line) for data in self.files.values() for line in data.splitlines())
        return sorted(json.dumps(row, sort_keys=True) for row in rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[list[str]]:
    """What one process gives."""
    answerer = Answerer({"model": model, "threads": 1}, PARAMS, ("prompt", "text", "id"), None)
    batch = answerer({name: [row[name] for row in prompts()] for name in ("id", "prompt")})
    yield sorted(
        json.dumps(dict(zip(batch, values, strict=True)), sort_keys=True)
        for values in zip(*batch.values(), strict=True)
    )
    answerer._llm.close()


def test_killed_and_resumed_it_is_one_process_byte_for_byte(
    farm: Farm, tmp_path: Path, model: Path, alone: list[str]
) -> None:
    def num_kept() -> int:
        return sum(path.read_bytes().count(b'"result"') for path in (tmp_path / "journal").glob("*.journal"))

    job = Job(farm, tmp_path, model, "journal")
    job.killed(lambda: num_kept() >= 40)
    assert 40 <= num_kept() < NUM_PROMPTS
    job.finished()
    assert num_kept() < NUM_PROMPTS + 40  # what was finished was not drawn again
    assert job.rows == alone


def test_with_rays_own_checkpoint_too(farm: Farm, tmp_path: Path, model: Path, alone: list[str]) -> None:
    """What was written stays as it is, also by a job that finds nothing left to do; what was not is drawn again."""

    def committed() -> list[Path]:
        return [path for path in (tmp_path / "checkpoint").glob("*.parquet") if not path.name.endswith(PENDING)]

    job = Job(farm, tmp_path, model, "checkpoint")
    job.killed(lambda: len(committed()) >= 4)
    half_done, *done = committed()
    half_done.rename(half_done.with_name(half_done.stem + PENDING))  # as if it was killed before its last act
    kept = {name: data for name, data in job.files.items() if any(name.startswith(path.stem) for path in done)}
    assert len(kept) == len(done) >= 3
    job.finished()
    assert kept.items() < job.files.items()
    assert not any(name.startswith(half_done.stem) for name in job.files)
    assert job.rows == alone
    before = job.files
    job.finished()
    assert job.files == before


def test_a_journal_of_other_parameters_is_refused(tmp_path: Path, model: Path) -> None:
    load, columns = {"model": model, "threads": 1}, ("prompt", "text", "id")
    first = Answerer(load, PARAMS, columns, str(tmp_path / "journal"))
    assert isinstance(first._llm, LLM)
    first({"id": [1], "prompt": ["abc"]})
    first._llm.close()
    first._journals._own.close()
    with pytest.raises(Exception, match="differed in its params"):
        Answerer(load, {**PARAMS, "top_k": 3}, columns, str(tmp_path / "journal"))
