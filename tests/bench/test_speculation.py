"""All parts of the figures of speculation on a tiny model; a drafter that changes the output ends the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.support.tiny_llm import CONFIG, write_model
from verispec.backends.numpy_dense import Dense
from verispec.backends.protocol import BackendLimits

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import drafting
import replays
import speculation
import tables

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("native_kernels")]
PARTS = ("tasks", "trees", "replay", "recomputed", "auto")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("models")
    config = replace(CONFIG, context_len=512, mlp_size=64)
    target, draft = (
        write_model(folder / "target.gguf", config),
        write_model(folder / "draft.gguf", replace(config, seed=1)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(speculation, "MOST_ROWS", 8)
        yield target, draft


def command(models: tuple[Path, Path], file: Path, *more: str) -> list[str]:
    target, draft = models
    return [
        "--json", str(file), "--model", str(target), "--draft-model", str(draft), "--backend", "native",
        "--seconds", "0.01", "--drafters", "suffix", "lookup", "decode", "model", "auto", "--batch", "1", "2",
        "--temperature", "1", "--tokens", "6", "--prompt-len", "40", "--count", "2", "--files", "1",
        "--tree-prompts", "2", "--requests", "4", "--rounds", "1", *more,
    ]  # fmt: skip


def test_one_command_measures_everything_and_goes_on_where_it_was(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    speculation.main(command(models, file))
    first = json.loads(file.read_text())["cells"]
    assert {cell["part"] for cell in first.values()} == set(PARTS)
    assert "cells are left for another time" in capsys.readouterr().out
    speculation.main(command(models, file, "--parts", "recomputed"))
    found = json.loads(file.read_text())
    assert first.items() < found["cells"].items()
    for cell in found["cells"].values():
        for arm in cell.get("arms", {}).values():
            value, low, high = arm["speed_up"]
            assert 0 < low <= value * 1.000001
            assert value <= high * 1.000001
    tree = next(cell for cell in found["cells"].values() if cell["part"] == "trees")
    assert {"SD", "RSD-C", "RSD-S", "one-hot", "match chain", "match branch", "match beam"} < set(tree["arms"])
    assert {name for name, arm in tree["arms"].items() if "compared" in arm} == {"match branch", "match beam"}
    assert all(arm["predicted"] > 0 for name, arm in tree["arms"].items() if name != "none")
    said = "\n".join(tables.tables(found))
    assert all(f"### {part}" in said for part in PARTS)
    picture = ElementTree.fromstring(tables.chart(found, "target.gguf", 1.0))
    shown = [node.text for node in picture.iter() if node.text and node.tag.endswith("text")]
    assert all(f"{arm['speed_up'][0]:.2f}" in shown for arm in _one_stream(found)["arms"].values())


def test_replays_have_every_share_and_latencies_of_both_kinds(models: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    speculation.main(command(models, file, "--parts", "replay", "--seconds", "60"))
    cells = {cell["share"]: cell["arms"] for cell in json.loads(file.read_text())["cells"].values()}
    assert list(cells) == [0, 10, 50, 100]
    assert list(cells[0]) == ["all non-deterministic"]
    arrivals = cells[50]["decode"]["arrivals"]
    for name in ("tokens_per_second", "deterministic latency p99", "other latency p50", "other gap p99"):
        median, low, high = arrivals[name]
        assert 0 < low <= median <= high
    assert low < high  # several runs
    assert not any(name.startswith("other") for name in cells[100]["none"]["arrivals"])
    between = {arm["arrivals"]["seconds_between"] for arms in cells.values() for arm in arms.values()}
    assert len(between) == 1


def _one_stream(found: dict[str, Any]) -> dict[str, Any]:
    """A cell of the chart, with the arms that it shows."""
    cell = next(c for c in found["cells"].values() if c["part"] == "tasks" and c["batch"] == 1)
    return {"arms": {name: arm for name, arm in cell["arms"].items() if name in tables.SYSTEMS}}


def test_everything_is_measured_once_before_anything_is_measured_again(tmp_path: Path) -> None:
    bench = object.__new__(speculation.Bench)
    bench.options, bench.name, bench.end = SimpleNamespace(rounds=2), "model", float("inf")
    bench.results = speculation.Results(tmp_path / "out.json")
    bench.results.add("part | model | b", {})
    seen = [(key[-1], value, turn) for key, value, turn in bench.turns("part", {"a": 1, "b": 2, "c": 3})]
    assert seen == [("a", 1, 1), ("c", 3, 1), ("a", 1, 2), ("c", 3, 2)]
    bench.end = 0.0
    assert [turn for *_, turn in bench.turns("part", {"a": 1, "c": 3})] == [1]


def test_one_hot_trees_are_grown_by_the_host() -> None:
    limits = BackendLimits(48, 64, 64, 4, 16, 2, trees=True)
    assert not drafting.OneHot(SimpleNamespace(limits=limits)).limits.trees


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_few_bits_stand_for_nearly_the_same(bits: int) -> None:
    w = np.random.default_rng(bits).standard_normal((70, 96)).astype(np.float32)
    w[5, 32:64] = 0
    found = replays.rounded(Dense(w), bits).outputs(np.arange(70, dtype=np.int32))
    step = np.abs(w).reshape(70, -1, 32).max(axis=-1, keepdims=True) / 2 ** (bits - 1)
    error = np.abs(found - w).reshape(70, -1, 32)
    assert (error <= 1.2 * step + 1e-6).all()  # the largest may be cut off where that is better for the others
    assert 0.3 * step.mean() > error.mean() > 0.1 * step.mean()


def test_a_drafter_that_changes_the_output_ends_the_run(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = drafting.Stage.run

    def other_seed(self: drafting.Stage, prompts: object, params: object, arm: drafting.Arm) -> drafting.Run:
        return run(self, prompts, replace(params, seed=9) if arm.name == "lookup" else params, arm)

    monkeypatch.setattr(drafting.Stage, "run", other_seed)
    with pytest.raises(SystemExit, match="lookup changed the output"):
        speculation.main(command(models, tmp_path / "out.json", "--parts", "tasks"))
