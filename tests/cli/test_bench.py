"""`verispec bench`, on a tiny model and a file of prompts."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.support.tiny_llm import write_model
from verispec.cli.bench import Speed
from verispec.types import SampleOutput

pytestmark = pytest.mark.slow

QUICK = ["--sequences", "1,3", "--repeats", "1", "--max-tokens", "24"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def tiny(bare_cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`bench` with two prompts, one of which brings parameters of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc the other", "id": 7}\n{"prompt": "the abba", "temperature": 1}\n')
    return lambda *words: bare_cli("bench", "-m", str(model), "--prompts", str(prompts), *QUICK, *words)


def test_a_row_per_drafter_and_two_columns_per_number_of_sequences(tiny: Cli) -> None:
    done = tiny("--drafters", "none,decode", "--repeats", "3")  # a busy machine may make the first useless
    assert done.code == 0, done.err
    heads, names, none, decode, _, outcome = done.out.splitlines()
    assert heads.split() == ["tok/s", "1", "sequence", "3", "sequences"]
    assert names.split() == ["drafter", "prompt", "decode", "prompt", "decode"]
    for name, row in (("none", none), ("decode", decode)):
        assert row.split()[0] == name
        assert all(float(cell) > 0 for cell in row.split()[1:])
    assert outcome == "All runs gave the same outputs, bit for bit, for each of 2 prompts."


def test_a_busy_moment_makes_nothing_look_fast() -> None:
    quiet = Speed("none", 1, 8, 1.0, 8, 2.0, 8, 0, 0)
    for busy in (quiet._replace(prompt_seconds=2.9, decode_seconds=0.1), quiet._replace(decode_seconds=5.0), quiet):
        for fastest in (quiet.faster(busy), busy.faster(quiet)):
            assert (fastest.prompt_seconds, fastest.decode_seconds) == (1.0, 2.0)


def test_json_counts_what_was_served(tiny: Cli, model: Path) -> None:
    found = tiny("--json", "--draft-model", str(model), "--force", "--ignore-eos").json()
    assert found["equal"] is True
    assert found["prompts"] == 2
    speeds = {(speed["drafter"], speed["sequences"]): speed for speed in found["speeds"]}
    assert {name for name, _ in speeds} >= {"none", "suffix", "decode", "model", "auto"}
    for (_, sequences), speed in speeds.items():
        num_requests = 4 if sequences == 1 else 6  # whole groups
        assert speed["new_tokens"] == num_requests * 23
        assert speed["prompt_rate"] == speed["prompt_tokens"] / speed["prompt_seconds"] > 0
    assert speeds["model", 1]["accepted"] > 0, "the model drafts for itself"
    assert speeds["none", 1]["drafted"] == 0
    assert speeds["model", 1]["passes"] < speeds["none", 1]["passes"]


def test_outputs_that_differ_are_told(tiny: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count()
    monkeypatch.setattr(SampleOutput, "digest", property(lambda self: str(next(counter))))
    assert "Outputs DIFFERED between runs." in tiny("--drafters", "none").out
    assert "as --no-deterministic allows" in tiny("--drafters", "none", "--no-deterministic").out


def test_a_plot(tiny: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    done = tiny("--drafters", "none,suffix", "--plot", str(picture))
    assert done.code == 0, done.err
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sequences", "1,0"], "--sequences must be numbers from 1 to 1024 with commas between, not '1,0'"),
        (["--sequences", ""], "--sequences must be numbers"),
        (["--sequences", "9" * 30], "--sequences must be numbers"),
        (
            ["--drafters", "none,magic"],
            "--drafters: 'magic' cannot draft here, only none, suffix, lookup, grammar, decode",
        ),
        (["--drafters", "model"], "it needs --draft-model"),
        (["--drafters", "skip"], "`verispec tune` makes it possible"),
        (["--repeats", "0"], "--repeats must be from 1 to 100, not 0"),
        (["--plot", "speed.pdf"], "--plot speed.pdf: the name of a plot ends in .png"),
        (["--plot", "/no/such/folder/speed.png"], "is not a file that can be written"),
        (["--prompts", "no-such-file"], "--prompts no-such-file: No such file"),
        (["--temp", "-1"], "--temperature must be in [0, 100]"),
    ],
)
def test_what_bench_refuses(tiny: Cli, arguments: list[str], words: str) -> None:
    done = tiny(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_a_bad_prompt_and_a_missing_package_are_found_before_any_work(
    tiny: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "abc"}) + '\n{"prompt": 5}\n')
    done = tiny("--prompts", str(tmp_path / "bad.jsonl"))
    assert re.search(r"bad.jsonl, line 2: .*prompt.* must be text, not int\n$", done.err)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("verispec.llm.LLM", None)
    done = tiny("--plot", "speed.png")
    assert (done.code, done.out) == (2, "")
    assert done.err == "verispec: --plot needs matplotlib: pip install 'verispec[bench]'\n"
