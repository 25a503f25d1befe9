"""A worker process that dies is replaced, and its lines go on behind what they have committed. With toy processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verispec.batch.answers import Options, Result
from verispec.batch.journal import Commit, StoppedError
from verispec.batch.workers import ProcessWorker

# A process answers a line with the tokens it was given, unless a file has another fate for it.
TOY = """#!{python} -SE
import json, os, sys

def say(message):
    os.write(1, json.dumps(message).encode() + b"\\n")

lives = open({folder!r} + "/lives").read().split()
open({folder!r} + "/lives", "w").write(" ".join(lives[1:]))
fate = lives[0] if lives else ""
sys.stdin.readline()
say({{"parts": {{"model": "other" if fate == "changed" else "toy"}}, "size": 2}})
while not (asked := json.loads(sys.stdin.readline())).get("stop"):
    ids = [i for commit in asked["samples"] for i in commit["ids"]]
    if fate == "silent" or (fate == "half" and asked["line"] == 1):
        os._exit(9)
    if fate == "sorry":
        say({{"failure": "it is broken"}})
        os._exit(1)
    if fate == "once":
        commit = {{"sample": 0, "at": len(ids), "ids": [len(ids)], "logprobs": [-0.5], "text": "x"}}
        say({{"line": asked["line"], "commit": commit}})
        os._exit(9)
    say({{"line": asked["line"], "result": json.dumps(ids), "receipts": [], "error": None}})
"""
Answer = tuple[list[Result], list[tuple[int, Commit]], list[str]]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Two lines, answered by processes with these fates: their results, what was committed, and what was said."""
    toy = tmp_path / "toy"
    toy.write_text(TOY.format(python=sys.executable, folder=str(tmp_path)))
    toy.chmod(0o755)
    monkeypatch.setattr("verispec.batch.workers.sys.executable", str(toy))

    async def run() -> Answer:
        commits: list[tuple[int, Commit]] = []
        said: list[str] = []
        worker = ProcessWorker({}, Options(), note=said.append)
        try:
            await worker.start(lambda index, commit: commits.append((index, commit)))
            async with asyncio.timeout(20):
                results = [await worker.answer(i, b"line", {}, None) for i in range(2)]
        finally:
            await worker.stop()
        return results, commits, said

    def answered(*fates: str) -> Answer:
        (tmp_path / "lives").write_text(" ".join(fates))
        return asyncio.run(run())

    return answered


def test_its_lines_go_on_behind_what_they_have_committed(answers: Callable[..., Answer]) -> None:
    results, commits, said = answers("once", "once", "half", "once")
    assert [json.loads(result.result) for result in results] == [[0, 1], [0]]
    assert [(index, commit.at) for index, commit in commits] == [(0, 0), (0, 1), (1, 0)]
    assert said == ["a worker process ended with code 9; another one goes on with its lines"] * 4
    assert answers()[1:] == ([], [])


def test_one_that_will_never_do_is_not_replaced_for_ever(answers: Callable[..., Answer]) -> None:
    with pytest.raises(StoppedError, match="ended with code 9; what is finished is kept"):
        answers("silent", "silent", "silent")
    assert answers("silent", "silent", "half", "silent", "silent")[0]  # one of them finished a line
    with pytest.raises(StoppedError, match="it is broken"):
        answers("sorry")
    with pytest.raises(StoppedError, match="the model was changed"):
        answers("once", "changed")
