"""The journal: whatever happens to its bytes, what it gives back is a part of what was put in, and never another."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from verispec.batch.journal import Commit, Journal, Sample, StoppedError, atomic
from verispec.errors import InputError
from verispec.types import TokenLogprob, TokenLogprobs

PARTS = {"input": "abc", "model": "m"}


@pytest.fixture(autouse=True)
def _hasty_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


def entries(start: int, count: int, *, alternatives: bool = False) -> TokenLogprobs:
    more = ((7, -0.5), (8, -1.25)) if alternatives else ()
    return TokenLogprobs.of(TokenLogprob(i, -0.1 * i - 1e-9, more) for i in range(start, start + count))


def filled(path: Path) -> list[Commit]:
    """A journal with one finished line and two unfinished ones; returns what the latter have committed."""
    commits = [
        Commit(0, 0, entries(0, 3), "abc"),
        Commit(1, 0, entries(5, 2, alternatives=True), "äé"),
        Commit(0, 3, entries(3, 4), "defg"),
        Commit(0, 7, entries(7, 1), ""),
    ]
    with Journal.open(path) as journal:
        journal.begin(PARTS)
        journal.commit(1, Commit(0, 0, entries(0, 9), "gone"))
        for commit in commits[:2]:
            journal.commit(2, commit)
        journal.finish(1, {"result": "one\n", "receipts": ["r"]})
        for commit in commits[2:]:
            journal.commit(2, commit)
        journal.finish(0, {"result": "zero"})
    return commits


def whole(commits: list[Commit], sample: int) -> Sample:
    found = Sample()
    for commit in commits:
        if commit.sample == sample:
            found.extend(commit.entries, commit.text)
    return found


def test_what_is_put_in_comes_out(tmp_path: Path) -> None:
    commits = filled(path := tmp_path / "j")
    with Journal.open(path) as journal:
        journal.begin(PARTS)
        assert list(journal.finished) == [1, 0]
        assert journal.record(1) == {"line": 1, "result": "one\n", "receipts": ["r"]}
        assert journal.samples(1) == {}
        assert journal.samples(2) == {0: whole(commits, 0), 1: whole(commits, 1)}
        assert journal.num_damaged == 0


def is_beginning(found: Sample, of: Sample) -> bool:
    size = len(found)
    return (found.since(0), found.text) == (of.since(0)[:size], of.text[: len(found.text)])


def check_is_part(path: Path, commits: list[Commit]) -> int:
    """What the file gives is some of what was put in, and it can be gone on with; returns how much there is."""
    with Journal.open(path) as journal:
        journal.begin(PARTS)
        for line in journal.finished:
            assert journal.record(line)["result"] == {0: "zero", 1: "one\n"}[line]
        samples = journal.samples(2)
        assert all(is_beginning(sample, whole(commits, i)) for i, sample in samples.items())
        for i, sample in samples.items():  # the next run goes on from there
            rest = whole(commits, i)
            journal.commit(2, Commit(i, len(sample), rest.since(len(sample)), rest.text[len(sample.text) :]))
        num_finished, num_tokens = len(journal.finished), sum(map(len, samples.values()))
    with Journal.open(path) as journal:
        assert len(journal.finished) == num_finished
        assert all(sample == whole(commits, i) for i, sample in journal.samples(2).items())
    return num_finished + num_tokens


def test_cut_at_any_byte(tmp_path: Path) -> None:
    commits = filled(tmp_path / "j")
    data = (tmp_path / "j").read_bytes()
    kept = []
    for cut in range(len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:cut])
        kept.append(check_is_part(tmp_path / "cut", commits))
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (0, 2 + 10)


def test_any_byte_changed(tmp_path: Path) -> None:
    """A damaged record is as if never written; without the first one nothing can be told of the others."""
    commits = filled(tmp_path / "j")
    data = (tmp_path / "j").read_bytes()
    header = data.index(b"\n") + 1
    kept = []
    for at in [*range(0, len(data), 5), *(i for i, byte in enumerate(data) if byte == ord("\n"))]:
        changed = bytearray(data)
        changed[at] ^= random.Random(at).randrange(1, 256)
        (tmp_path / "changed").write_bytes(changed)
        if at < header:
            with pytest.raises(InputError, match="first record is damaged"):
                Journal.open(tmp_path / "changed")
        else:
            kept.append(check_is_part(tmp_path / "changed", commits))
    assert (min(kept), max(kept)) == (2, 2 + 10)  # a line's end joins two records; one that is not needed does no harm


def test_control_a_token_that_is_forgotten_is_found(tmp_path: Path) -> None:
    """The checks above see a record that holds one token less than it says."""
    commits = filled(tmp_path / "j")
    with Journal.open(path := tmp_path / "short") as journal:
        journal.begin(PARTS)
        journal.commit(2, commits[0]._replace(entries=commits[0].entries[1:]))
    with pytest.raises(AssertionError):
        check_is_part(path, commits)


def test_a_gap_ends_a_sample(tmp_path: Path) -> None:
    with Journal.open(path := tmp_path / "j") as journal:
        journal.begin(PARTS)
        journal.commit(0, Commit(0, 0, entries(0, 2), "ab"))
        journal.commit(0, Commit(0, 3, entries(3, 2), "de"))
    with Journal.open(path) as journal:
        assert (journal.samples(0)[0].token_ids, journal.samples(0)) == ([0, 1], {})


def test_what_changed_is_refused_and_named(tmp_path: Path) -> None:
    filled(path := tmp_path / "j")
    before = path.read_bytes()
    for name in PARTS:
        with Journal.open(path) as journal, pytest.raises(InputError, match=f"its {name}"):
            journal.begin({**PARTS, name: "other"})
    assert path.read_bytes() == before
    path.write_bytes(b"")
    with Journal.open(path) as journal:
        journal.begin({**PARTS, "input": "other"})


def test_one_at_a_time(tmp_path: Path) -> None:
    code = "import sys, pathlib, verispec.batch.journal as j; j.Journal.open(pathlib.Path(sys.argv[1]))"
    with Journal.open(tmp_path / "j") as journal:
        journal.begin(PARTS)
        with pytest.raises(InputError, match="another batch"):
            Journal.open(tmp_path / "j")
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path / "j")], capture_output=True, check=False)
        assert b"another batch" in other.stderr
    Journal.open(tmp_path / "j").close()


def test_a_full_disk_loses_the_record_that_did_not_fit_and_no_other(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "j"
    try:
        with Journal.open(path) as journal:
            journal.begin(PARTS)
            journal.finish(0, {"result": "a"})
            size = path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
            with pytest.raises(StoppedError, match=f"{os.strerror(errno.EFBIG)}; 1 finished lines are kept"):
                journal.finish(1, {"result": "b" * 100})
            assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with Journal.open(path) as journal:
        assert (list(journal.finished), journal.num_damaged) == ([0], 0)


def test_replaced_as_a_whole(tmp_path: Path) -> None:
    filled(path := tmp_path / "j")
    with Journal.open(path) as journal:
        journal.replace({"done": "sha"})
    with Journal.open(path) as journal:
        assert (journal.header, journal.finished) == ({**PARTS, "done": "sha"}, {})
    assert [json.loads(line.split(b" ", 1)[1]) for line in path.read_bytes().splitlines()][1] == {"done": "sha"}


def test_atomic_is_all_or_nothing(tmp_path: Path) -> None:
    (path := tmp_path / "f").write_bytes(b"old")
    with pytest.raises(TypeError), atomic(path) as file:
        file.write(b"new" + None)
    assert ([p.name for p in tmp_path.iterdir()], path.read_bytes()) == (["f"], b"old")
    with atomic(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
