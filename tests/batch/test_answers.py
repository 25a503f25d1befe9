"""A line's result is a function of the line: not of what else runs, nor of where it was cut off and went on."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_lines import BAD, line, write_lines
from tests.support.tiny_llm import loaded
from verispec.batch.answers import Answerer, Options, Result
from verispec.batch.journal import Sample
from verispec.batch.lines import find_repeated, open_lines
from verispec.batch.resume import Progress
from verispec.llm import LLM
from verispec.receipt import parse, replay
from verispec.types import SamplingParams, TokenLogprobs

KINDS = range(7)
RECORDED = Options(receipts=True)


class Remembered(Sample):
    """Knows what it held after every commit."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [(0, 0)]

    def extend(self, entries: TokenLogprobs, text: str) -> None:
        super().extend(entries, text)
        self.ends.append((len(self), len(self.text)))

    def cut(self, size: int) -> Sample:
        num_tokens, num_chars = max(end for end in self.ends if end[0] <= size)
        found = Sample()
        found.extend(self.since(0)[:num_tokens], self.text[:num_chars])
        return found


def answered(llm: LLM, data: Any, samples: dict[int, Any] | None = None, options: Options = RECORDED) -> Result:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return asyncio.run(Answerer(llm, options).answer(0, text, Progress(samples or {})))


@pytest.mark.parametrize("kind", KINDS)
def test_cut_anywhere_the_result_is_the_same(stepwise: LLM, tiny: LLM, kind: int) -> None:
    """Receipts, log-probabilities and all: n > 1, T = 1, penalties, stop strings, tokens that the client gave."""
    samples = {number: Remembered() for number in range(4)}
    whole = answered(stepwise, line(kind), samples)
    assert whole.error is None
    assert whole.receipts
    size = max(map(len, samples.values()))
    assert size >= 8
    assert all(len(sample.ends) == len(sample) + 1 for sample in samples.values())
    for cut in (1, 2, 5, size):
        assert answered(tiny, line(kind), {i: sample.cut(cut) for i, sample in samples.items()}) == whole, cut


def test_control_a_journal_that_forgets_or_changes_a_token_is_noticed(stepwise: LLM, tiny: LLM) -> None:
    samples = {number: Remembered() for number in range(4)}
    whole = answered(stepwise, line(1), samples)
    for change in (slice(1, None), slice(None, None, -1)):
        wrong = samples[1].cut(6)
        wrong.token_ids, wrong.values = wrong.token_ids[change], wrong.values[change]
        wrong.alternatives = wrong.alternatives[change]
        assert answered(tiny, line(1), {1: wrong}) != whole


def test_what_depends_on_the_load_is_not_gone_on_with(stepwise: LLM) -> None:
    samples = {0: Remembered()}
    asked = {**line(0), "deterministic": False, "n": 1}
    assert answered(stepwise, asked, samples, Options()).error is None
    assert len(samples[0]) == 0
    del asked["deterministic"]
    assert answered(stepwise, asked, samples, Options()).error is None
    assert len(samples[0]) > 0


def test_results_depend_on_nothing_else(tiny: LLM, tiny_path: Path) -> None:
    """All at once or one by one, with any drafter, cached or not."""
    with loaded(tiny_path, tiny_path.parent / "cache", drafter="none", max_running=2, prefix_cache=False) as other:

        async def together() -> list[Result]:
            answerer = Answerer(other, RECORDED)
            return await asyncio.gather(
                *(answerer.answer(0, json.dumps(line(i)).encode(), Progress()) for i in range(12))
            )

        assert asyncio.run(together()) == [answered(tiny, line(i)) for i in range(12)]


def test_load_shows_only_where_it_is_asked_for(tiny: LLM) -> None:
    for kind in KINDS:
        found = answered(tiny, line(kind), options=Options(stats=True)).result
        plain = answered(tiny, line(kind)).result
        for name in ("tokens_per_pass", "cached_tokens", "metrics", "_per_second", "stats"):
            assert name not in plain
        assert "cached_tokens" in found


def test_seeds_and_ids_come_from_the_line(tiny: LLM) -> None:
    asked = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "ab", "max_tokens": 8}}
    one, again, other = (
        json.loads(answered(tiny, {**asked, "custom_id": name}).result)["response"]["body"] for name in "aab"
    )
    assert one == again
    assert one["id"] != other["id"]
    assert one["verispec"]["seed"] != other["verispec"]["seed"]
    assert one["choices"][0]["text"] != other["choices"][0]["text"]
    seeded = answered(tiny, {**asked, "body": {**asked["body"], "seed": other["verispec"]["seed"]}}).result
    assert json.loads(seeded)["response"]["body"]["choices"] == other["choices"]


def test_what_cannot_be_served_is_an_error_in_its_place(tiny: LLM, tmp_path: Path) -> None:
    with closing(open_lines(write_lines(tmp_path / "in.jsonl", 2, bad=True))) as file:
        lines = [file[i] for i in range(len(file))]
    repeated = find_repeated(lines)
    assert repeated == {7: 1}

    async def results() -> list[Result]:
        answerer = Answerer(tiny, Options())
        return [await answerer.answer(i, lines[i], Progress(), earlier=repeated.get(i)) for i in range(2, len(lines))]

    for (text, said), result in zip(BAD, asyncio.run(results()), strict=True):
        assert said in (result.error or ""), (text, result)
        assert (result.error is None) == (said == ""), (text, result)
        result.result.encode()
        assert "\n" not in result.result
        found = json.loads(result.result)
        if "custom_id" in found and found["response"] is not None:
            assert found["response"]["status_code"] in (400, 404)
            assert found["response"]["body"]["error"]["message"]
        elif "custom_id" in found:
            assert found["error"]["message"] == result.error


def test_receipts_can_be_replayed(tiny: LLM) -> None:
    result = answered(tiny, line(2))
    receipts = [parse(text) for text in result.receipts]
    assert len(receipts) == 4
    assert all(replay(tiny, receipt).reproduced for receipt in receipts)


def test_options_survive_the_way_to_another_process() -> None:
    params = SamplingParams(logit_bias={3: 0.5}, stop=("a", "b"), stop_ids=(4,), seed=7, max_tokens=None)  # type: ignore[arg-type]
    options = Options(params=params, raw=True, system="s", served_names=("a", "b"), receipts=True)
    assert Options.from_json(options.to_json()) == options
    assert Options.from_json(options.to_json()) != replace(options, raw=False)
