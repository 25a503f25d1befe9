"""`verispec batch` as a command: what it takes, what it says, and that more processes change nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Cli
from tests.support.batch_lines import line, write_lines
from tests.support.tiny_llm import write_model
from verispec.batch.run import Batch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def batch(bare_cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))
    return lambda *arguments, **more: bare_cli("batch", *map(str, arguments), "-m", str(model), **more)


def test_prompt_lines_give_what_generate_gives(batch: Cli, bare_cli: Cli, model: Path, tmp_path: Path) -> None:
    prompts = [json.dumps(line(i)) for i in (0, 4, 6, 11)] + ['{"prompt": "ab", "seed": 7}', '{"prompt": 3}']
    (tmp_path / "in").write_text("\n".join(prompts) + "\n\n")
    options = ["--max-tokens", "9", "--temperature", "1", "--system", "th"]
    done = batch(tmp_path / "in", tmp_path / "out", "--receipts", tmp_path / "proof", *options)
    assert (done.code, done.out) == (2, "")
    assert "1 of 6 lines failed; line 6" in done.err
    receipt = ["--receipt", str(tmp_path / "receipts")]
    same = bare_cli("generate", "--prompts", str(tmp_path / "in"), "-m", str(model), *options, *receipt)
    assert (tmp_path / "out").read_text() == same.out
    assert (tmp_path / "proof").read_bytes() == (tmp_path / "receipts").read_bytes()
    again = batch(tmp_path / "in", tmp_path / "out", "--receipts", tmp_path / "proof", *options)
    assert (again.code, "is complete already" in again.err, "1 of 6 lines failed" in again.err) == (2, True, True)


@pytest.mark.slow
def test_more_processes_and_a_second_opinion_change_nothing(
    batch: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in", 18)
    assert batch(tmp_path / "in", tmp_path / "one").code == 0
    options = ["--workers", "2", "--batch-size", "3", "--drafter", "none", "--verify-sample", "20%"]
    done = batch(tmp_path / "in", tmp_path / "two", *options)
    assert done.code == 0, done.err
    assert "answering 4 lines again in another process" in done.err
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    monkeypatch.setattr(Batch, "differing", lambda *_: [3, 5])
    done = batch(tmp_path / "in", tmp_path / "three", "--verify-sample", "20%")
    assert (done.code, "came out differently in another process: 4, 6" in done.err) == (1, True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "three").read_bytes()


def _children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for child processes in /proc")
def test_a_worker_that_dies_is_replaced_and_one_whose_parent_dies_ends(batch: Cli, model: Path, tmp_path: Path) -> None:
    """Both of them die, later the parent does; what is left is done in this process, and the file is the same."""
    write_lines(tmp_path / "in", 150, num_tokens=80)
    journal = tmp_path / "out.journal"
    slowly = ["--batch-size", "1", "--save-every", "0.1"]  # seconds, to be caught at work in twice
    command = [*COMMAND, "batch", "in", "out", "-m", str(model), "--workers", "2", *slowly]
    env = {**os.environ, "XDG_CACHE_HOME": str(model.parent)}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)

    def working(since: int, *, without: Sequence[int] = ()) -> list[int]:
        """Two workers, once they have added to the journal."""
        while True:
            assert process.poll() is None, process.communicate()
            workers = sorted(set(_children(process.pid)) - set(without))
            if len(workers) == 2 and journal.exists() and journal.stat().st_size > since + 2000:
                return workers
            time.sleep(0.01)

    first = working(0)
    for worker in first:
        os.kill(worker, signal.SIGKILL)
    second = working(journal.stat().st_size, without=first)
    process.kill()
    _, said = process.communicate(timeout=60)
    assert said.count("a worker process ended with code -9; another one goes on with its lines") == 2, said
    while any(Path(f"/proc/{worker}").exists() for worker in second):
        time.sleep(0.01)  # or for ever: a limit on the whole suite ends it
    for target in ("out", "alone"):
        assert batch(tmp_path / "in", tmp_path / target).code == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "alone").read_bytes()


def test_what_cannot_be_is_said_before_the_model_is_loaded(bare_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "ab"}\n')
    (tmp_path / "empty").write_text("\n\n")
    out, source = str(tmp_path / "out"), str(tmp_path / "in")
    for arguments, said in (
        (["missing", out], "No such file"),
        ([str(tmp_path / "empty"), out], "the file is empty"),
        ([source, str(tmp_path)], "exists already"),
        ([source, str(tmp_path / "no" / "out")], "No such file"),
        (["-", out], "must be a file"),
        ([source, "-"], "must be a file"),
        ([source, out, "--verify-sample", "1"], "must be a share such as 1%"),
        ([source, out, "--verify-sample", "101%"], "must be a share such as 1%"),
        ([source, out, "--workers", "0"], "--workers must be from 1"),
        ([source, out, "--raw", "--system", "x"], "--system needs the chat template"),
    ):
        done = bare_cli("batch", *arguments, "-m", "no-such-model")
        assert (done.code, said in done.err) == (2, True), (arguments, done.err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "in"]


def test_names_stats_and_order(batch: Cli, tmp_path: Path) -> None:
    body = {"prompt": "ab", "max_tokens": 4, "model": "gpt-9"}
    asked = {"custom_id": "a", "url": "/v1/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(asked))
    refused = batch(tmp_path / "in", tmp_path / "refused", "--unordered")
    assert (refused.code, "the only line failed" in refused.err) == (2, True)
    served = batch(tmp_path / "in", tmp_path / "served", "--served-model-name", "gpt-9", "--stats")
    assert served.code == 0
    found = json.loads((tmp_path / "served").read_text())["response"]["body"]
    assert found["model"] == "gpt-9"
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert found["created"] > 0


def test_lines_of_openai_need_the_server(batch: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_text(json.dumps(line(1)))
    monkeypatch.setitem(sys.modules, "verispec.server.app", None)
    done = batch(tmp_path / "in", tmp_path / "out")
    assert (done.code, "pip install 'verispec[server]'" in done.err) == (2, True), done.err


def test_parquet(batch: Cli, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = [line(i) for i in (1, 3)]
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "struct.parquet")
    as_text = [{**each, "body": json.dumps(each["body"])} for each in lines]
    parquet.write_table(pyarrow.Table.from_pylist(as_text), tmp_path / "text.parquet")
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for source, target in (
        ("in.jsonl", "a.jsonl"), ("in.jsonl", "b.parquet"), ("struct.parquet", "c.parquet"), ("text.parquet", "d.jsonl")
    ):  # fmt: skip
        assert batch(tmp_path / source, tmp_path / target).code == 0
    plain = (tmp_path / "a.jsonl").read_text()
    assert (tmp_path / "d.jsonl").read_text() == plain
    assert (tmp_path / "b.parquet").read_bytes() == (tmp_path / "c.parquet").read_bytes()
    table = parquet.read_table(tmp_path / "b.parquet").to_pydict()
    assert ("".join(f"{each}\n" for each in table["line"]), table["id"]) == (plain, ["request-1", "request-3"])
    assert all(isinstance(text, str) and text in plain for text in table["text"])
