"""A Ray Data job over 500 prompts, killed and started again: the bytes of one process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.scale.conftest import Farm
from tests.scale.data_job import NUM_PROMPTS, PARAMS, prompts
from tests.support.chat_model import write_chat_model
from verispec.llm import LLM
from verispec.ray.data import Answerer


def finished(folder: Path) -> int:
    return sum(path.read_bytes().count(b'"result"') for path in (folder / "journal").glob("*.journal"))


def test_killed_and_resumed_it_is_one_process_byte_for_byte(farm: Farm, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "tests.scale.data_job", farm.address, str(model), str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while finished(tmp_path) < 40 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    job.kill()
    job.wait()
    kept = finished(tmp_path)
    assert 40 <= kept < NUM_PROMPTS, kept
    time.sleep(1.0)  # its actors go, too
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    assert finished(tmp_path) < NUM_PROMPTS + 40  # what was finished was not drawn again
    rows = [json.loads(line) for path in (tmp_path / "out").glob("*.json") for line in path.read_text().splitlines()]
    assert len(rows) == NUM_PROMPTS
    found = sorted(json.dumps(row, sort_keys=True) for row in rows)
    alone = Answerer({"model": model, "threads": 1}, PARAMS, ("prompt", "text", "id"), None)
    batch = alone({name: [row[name] for row in prompts()] for name in ("id", "prompt")})
    wanted = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    assert found == sorted(json.dumps(row, sort_keys=True) for row in wanted)
    alone._llm.close()


def test_a_journal_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny.gguf")
    load, columns = {"model": model, "threads": 1}, ("prompt", "text", "id")
    first = Answerer(load, PARAMS, columns, str(tmp_path / "journal"))
    assert isinstance(first._llm, LLM)
    first({"id": [1], "prompt": ["abc"]})
    first._llm.close()
    first._journals._own.close()
    with pytest.raises(Exception, match="differed in its params"):
        Answerer(load, {**PARAMS, "top_k": 3}, columns, str(tmp_path / "journal"))
