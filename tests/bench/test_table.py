"""The speed table on a tiny model, beside programs that answer as llama.cpp's do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny_llm import CONFIG, write_model

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "bench/table.py"
PERPLEXITY = 'echo "Final estimate: PPL = 15.8210 +/- 0.5"'
BENCH = """case "$*" in *--version*) echo "version: 1 (abc)";; *Q8_0*) r=50;; *) r=200;; esac
echo '{"n_kv_max": 1, "speed_pp": '$r', "speed_tg": '$r'}'"""
QUANTIZE = 'cp "$2" "$3"'


def programs(folder: Path, **texts: str) -> Path:
    """A folder as a build of llama.cpp has it."""
    known = {"perplexity": PERPLEXITY, "batched-bench": BENCH, "quantize": QUANTIZE, **texts}
    for name, text in known.items():
        path = folder / f"llama-{name}"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return folder


def make_table(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    model = write_model(folder / "model.gguf", replace(CONFIG, context_len=1024), metadata={"general.file_type": 3})
    (folder / "text.txt").write_text("the other father " * 200)
    command = [
        sys.executable, SCRIPT, "--llama", folder, "--text", folder / "text.txt", "--model", model, "--chunks", "2",
        "--prompt-len", "8", "--new", "6", "--repeats", "2", "--parallel", "1", "3", "--threads", "1", *options,
    ]  # fmt: skip
    return subprocess.run(
        list(map(str, command)),
        env={**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache")},
        capture_output=True,
        text=True,
    )


def test_one_command_makes_the_whole_table(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = make_table(programs(tmp_path), "--requantise", "Q8_0", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["about"]["llama.cpp"] == "version: 1 (abc)"
    ours, same, other = found["rows"]
    assert [row["name"] for row in found["rows"]] == ["verispec, Q4_1", "llama.cpp, Q4_1", "llama.cpp, Q8_0"]
    assert ours["perplexity"] == pytest.approx(found["float32 perplexity"], rel=0.01)
    assert same["perplexity"] == 15.821
    assert same["speeds"] == {"1": [[200, 200]] * 2, "3": [[200, 200]] * 2}
    assert other["speeds"] == {"1": [[50, 50]] * 2, "3": [[50, 50]] * 2}
    assert all(prompt > 0 and decode > 0 for rounds in ours["speeds"].values() for prompt, decode in rounds)
    head, *lines = done.stdout[done.stdout.index("| engine") :].splitlines()
    assert head == "| engine and format | perplexity | prompt, 1 | prompt, 3 | decode, 1 | decode, 3 |"
    assert all(line.count("|") == head.count("|") for line in lines)
    assert lines[2] == "| llama.cpp, Q4_1 | 15.82 | " + " | ".join(["200 (200-200)"] * 4) + " |"
    ratios = {line.split(" | ")[0]: [float(cell) for cell in line.split("|")[3:-1]] for line in lines[-2:]}
    slow, fast = ratios["| verispec / llama.cpp, Q4_1"], ratios["| verispec / llama.cpp, Q8_0"]
    assert fast == pytest.approx([4 * ratio for ratio in slow], rel=0.1, abs=0.05)


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ({"quantize": "echo no such type; exit 1"}, [], "llama-quantize --allow-requantize"),
        ({"batched-bench": "echo what?"}, [], "nothing like (version"),
        ({}, ["--chunks", "999"], "give --chunks "),
    ],
)
def test_what_goes_wrong_is_said(tmp_path: Path, texts: dict[str, str], options: list[str], words: str) -> None:
    done = make_table(programs(tmp_path, **texts), *options)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
