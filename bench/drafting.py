"""What speculation is measured with: prompts by task, drafters by name, runs of one engine, and what passes cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verispec import LLM, SamplingParams
from verispec.backends.protocol import (
    FULL_VIEW,
    Backend,
    BackendLimits,
    NoisyTopK,
    Pass,
    ReadyTicket,
    Ticket,
    TopKWanted,
    View,
)
from verispec.engine import Request
from verispec.engine.request import new_batch
from verispec.kv import DRAFT_STORE, TARGET_STORE
from verispec.spec.drafter import Curve, Drafter, Refusal
from verispec.spec.none import NoDrafter
from verispec.spec.rate import Rate
from verispec.spec.registry import DRAFTERS, DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.suffix import SuffixConfig, SuffixDrafter
from verispec.spec.tree import TreeShape
from verispec.spec.turn import SequenceView, Turn
from verispec.types import Accept, Draft, SampleOutput

CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
NAMES = {"summarization": "summarisation", "math_reasoning": "maths", "qa": "question answering"}
MOST_TRIES = 3  # of runs in which graphs are captured
EDITS = "edits"  # the task of files that are changed in steps
STEPS = (
    "Rename the first function to main.",
    "Add a comment above each return.",
    "Add type hints.",
    "Add a docstring to each function.",
)


class Prompts:
    """Texts by task. Files are JSON lines: Spec-Bench (`turns`, `category`), HumanEval (`prompt`, with its
    `canonical_solution`) or questions (`question`). Without files there are a few words."""

    def __init__(self, llm: LLM, files: Sequence[Path], *, max_len: int) -> None:
        self._llm, self._max_len = llm, max_len
        self.texts: dict[str, list[str]] = {}
        self._code: list[str] = []
        self._known: dict[str, list[int]] = {}
        for line in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
            self._add(json.loads(line))
        if not files:
            self._add({"question": "which letter comes after the other"})
            self._add({"prompt": "a b c ", "canonical_solution": "d e f"})

    def _add(self, item: Mapping[str, Any]) -> None:
        if "turns" in item:
            task = "chat" if item["category"] in CHAT else NAMES.get(item["category"], item["category"])
            self.texts.setdefault(task, []).append(item["turns"][0])
        elif "canonical_solution" in item:
            self.texts.setdefault("code", []).append("Complete this function.\n\n" + item["prompt"])
            self._code.append(item["prompt"] + item["canonical_solution"])
        else:
            self.texts.setdefault("maths", []).append(item["question"])

    def of(self, task: str, count: int) -> list[list[int]]:
        """So many, spread over all that there are, as ids through the chat template; none twice before all are used."""
        listed = self.texts[task]
        most = min(count, len(listed))
        return [self._ids(listed[i % most * len(listed) // most]) for i in range(count)]

    def mixed(self, count: int) -> list[list[int]]:
        """So many of all tasks in turn."""
        tasks = sorted(self.texts)
        each = {task: self.of(task, -(-count // len(tasks))) for task in tasks}
        return [each[tasks[i % len(tasks)]][i // len(tasks)] for i in range(count)]

    def edits(self, num_files: int, max_tokens: int) -> list[list[int]]:
        """A file is changed in steps, and what is answered to a step is the next one's file.

        Generates these answers with drafter `none`: use it before there is another engine.
        """
        found = []
        for text in self._code[1 : 1 + num_files] or self._code[:num_files]:
            for step in STEPS:
                found.append(self._ids(f"{step} Answer with the whole file.\n```python\n{text}\n```"))
                params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
                text = self._llm.generate([found[-1]], params, drafter="none")[0].text
        return found

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._llm.chat_ids([{"role": "user", "content": text}])[-self._max_len :]
        return self._known[text]


class Arm(NamedTuple):
    """A way of drafting and judging, by its name in tables; `drafter` is one of `drafters_of`."""

    name: str
    drafter: str
    tree: str | None = None
    accept: Accept = Accept.MATCH

    @property
    def speculation(self) -> Speculation:
        return Speculation(self.drafter, None if self.tree is None else TreeShape.parse(self.tree), self.accept)

    @property
    def is_match(self) -> bool:
        """Whether its tokens are those of drafter `none`; other rules draw others, equally distributed."""
        return self.accept is Accept.MATCH


NONE = Arm("none", "none")


class PromptLookup(NoDrafter):
    """What followed the last 4, 3 or 2 tokens the previous time they occurred in the same sequence: `ngram`, which
    `suffix` has replaced."""

    def __init__(self) -> None:
        super().__init__("the last 2 tokens occurred nowhere before")
        self._rates = {n: Rate.fading(0.5, 4.0, 0.98) for n in (4, 3, 2)}
        self._positions: dict[int, dict[tuple[int, ...], int]] = {}
        self._matches: dict[
            int, tuple[int, int, int]
        ] = {}  # length, the position behind it, the sequence's length then

    @property
    def version(self) -> int:  # type: ignore[override]
        return sum(rate.version for rate in self._rates.values())

    def state(self, sequence: SequenceView) -> int | Refusal:
        tokens, end = sequence.token_ids, len(sequence.token_ids)
        positions = self._positions.setdefault(sequence.sequence_id, {})
        match = self._matches.get(sequence.sequence_id, (0, 0, 0))
        for position in range(match[2] + 1, end + 1):
            match = (0, 0, end)
            for n in self._rates:
                ngram = tuple(tokens[max(0, position - n) : position])
                if not match[0] and ngram in positions:
                    match = (n, positions[ngram], end)
                positions[ngram] = position
        self._matches[sequence.sequence_id] = match
        return match[0] or self._refusal

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        assert isinstance(key, int)
        return (Curve.chain(16, self._rates[key].value),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [Draft.chain(self._follow(turn.sequence, turn.choice.num_nodes)) for turn in turns]

    def _follow(self, sequence: SequenceView, num_nodes: int) -> list[int]:
        start = self._matches[sequence.sequence_id][1]
        followed = list(sequence.token_ids[start : start + num_nodes])
        while len(followed) < num_nodes:
            followed += followed[: num_nodes - len(followed)]
        return followed

    def observe(self, turn: Turn) -> None:
        if turn.verdict is not None and isinstance(turn.draft, Draft):
            length = self._matches[turn.sequence.sequence_id][0]
            self._rates[length].observe_chain(len(turn.verdict.path), len(turn.draft))

    def forget(self, sequence: SequenceView) -> None:
        self._positions.pop(sequence.sequence_id, None)
        self._matches.pop(sequence.sequence_id, None)


@dataclass(slots=True)
class OneHot:
    """A backend whose draft passes rank children by their logits alone: no noise, whatever the temperature. Trees that
    it drafts by itself would have noise: the host grows them."""

    backend: Backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    @property
    def limits(self) -> BackendLimits:
        return replace(self.backend.limits, trees=False)

    def submit(self, pass_: Pass) -> Ticket:
        asked = pass_.wanted.noisy_top_k
        if asked is not None and (pass_.store or pass_.view != FULL_VIEW):
            wanted = replace(pass_.wanted, noisy_top_k=None, top_k=TopKWanted(asked.rows, asked.k))
            result = self.backend.submit(replace(pass_, wanted=wanted)).result()
            assert result.top_k is not None
            ranked = NoisyTopK(*result.top_k, result.top_k.values)
            return ReadyTicket(replace(result, top_k=None, noisy_top_k=ranked))
        return self.backend.submit(pass_)


class Renewed:
    """A drafter that can be told to forget all it has learned. Unless it `is_for_auto`, `auto` does not have it."""

    def __init__(self, make: Callable[[], Drafter], *, is_for_auto: bool = False) -> None:
        self._make, self._is_for_auto = make, is_for_auto
        self._drafter, self._num_versions = make(), 0

    def renew(self) -> None:
        self._num_versions += 1 + self._drafter.version
        self._drafter = self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    @property
    def version(self) -> int:
        return self._num_versions + self._drafter.version

    def state(self, sequence: SequenceView) -> Any:
        if sequence.speculation.method == AUTO and not self._is_for_auto:
            return Refusal("not for auto")
        return self._drafter.state(sequence)

    def forget(self, sequence: SequenceView) -> None:
        if sequence.speculation.method != AUTO or self._is_for_auto:
            self._drafter.forget(sequence)


class Drafts(NamedTuple):
    """The model behind forced drafts, and how long `skip` predicts its chains should be."""

    view: View
    store: int
    draft_len: int


def forced_drafts(llm: LLM) -> dict[str, Drafts]:
    """By drafter: `skip` if there is a skip set for this model, `model` if there is a draft model."""
    found = {}
    menu = llm.skip_menu()
    entry = None if menu is None else menu.best()
    if menu is not None and entry is not None:
        draft_len = menu.profile.best(entry.view, entry.agreement).draft_len
        found["skip"] = Drafts(entry.view, TARGET_STORE, draft_len)
    if llm.calibration.draft_cost is not None:
        found["model"] = Drafts(FULL_VIEW, DRAFT_STORE, 7)
    return found


def drafters_of(llm: LLM, backend: Backend) -> dict[str, Drafter]:
    """Those of the engine; `n-grams`; `suffix` without history; and `skip` and `model` forced to draft."""
    menu, cost, draft_cost = llm.skip_menu(), llm.calibration.cost, llm.calibration.draft_cost
    setup = DraftSetup(backend=backend, cost=cost, find_menu=lambda: menu, draft_cost=draft_cost)
    found = make_drafters(setup)
    found["suffix"] = Renewed(lambda: DRAFTERS["suffix"](setup), is_for_auto=True)
    found["suffix, own text"] = Renewed(lambda: SuffixDrafter(SuffixConfig(history_len=0)))
    found["n-grams"] = Renewed(PromptLookup)
    found["lookup"] = Renewed(lambda: DRAFTERS["lookup"](setup), is_for_auto=True)
    for name, drafts in forced_drafts(llm).items():

        def forced(backend: Backend, name: str = name) -> Callable[[], Drafter]:
            """Drafts of full length."""
            return lambda: DRAFTERS[name](replace(setup, backend=backend, force=True, exits=False, draft_len=30))

        found[f"{name}, full"] = Renewed(forced(backend))
        found[f"{name}, one-hot"] = Renewed(forced(OneHot(backend)))
        exits = replace(setup, force=True, draft_len=drafts.draft_len)
        found[f"{name}, forced"] = Renewed(lambda name=name, exits=exits: DRAFTERS[name](exits))
    return found


@dataclass(slots=True)
class Run:
    """Requests of one arm that ran together: generation alone, the prompts being in the cache.

    `num_rounds` were asked of the backend, used or not; `num_waits` are passes of what drafts that the host waited for;
    `num_catch_ups` are those by which it reads what was committed, and nobody waits for. `prompt_len` is the mean.
    """

    outputs: list[SampleOutput]
    seconds: float
    num_rounds: int = 0
    num_waits: int = 0
    num_catch_ups: int = 0
    prompt_len: float = 0.0

    @property
    def context_len(self) -> float:
        """In the middle of an answer, on average."""
        return self.prompt_len + self.num_tokens / len(self.outputs) / 2

    @property
    def num_tokens(self) -> int:
        return sum(len(o.token_ids) for o in self.outputs)

    @property
    def num_passes(self) -> int:
        """Of the target, for each sequence; windows of `decode` are filled by such passes too."""
        return sum(o.stats.passes + o.stats.fast_passes for o in self.outputs)

    @property
    def digests(self) -> list[str]:
        return [o.digest for o in self.outputs]

    def total(self, name: str) -> int:
        return sum(getattr(o.stats, name) for o in self.outputs)


class Counted:
    """A backend that counts the rounds that are asked of it, and the passes by themselves of what drafts."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.num_rounds = self.num_waits = self.num_catch_ups = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    @property
    def counts(self) -> tuple[int, int, int]:
        """In the order of a run's fields."""
        return self.num_rounds, self.num_waits, self.num_catch_ups

    def submit(self, pass_: Pass) -> Ticket:
        if pass_.store != TARGET_STORE or pass_.view != FULL_VIEW:
            is_waited_for = bool(len(pass_.wanted.head_rows()))
            self.num_waits += is_waited_for
            self.num_catch_ups += not is_waited_for
        else:
            self.num_rounds += 1 if pass_.burst is None else 1 + pass_.burst.num_rounds
        return self._backend.submit(pass_)


def num_prepared(backend: Any) -> int:
    """Graphs that were captured so far, where passes are: a run that captures some says little."""
    return len(getattr(backend, "_graphs", ()))


class Stage:
    """One engine with the drafters of all arms; prompts stay in its prefix cache."""

    def __init__(self, llm: LLM, *, max_running: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._backend = Counted(llm.backend)
        self._drafters = drafters_of(llm, self._backend)  # type: ignore[arg-type]
        self._eos_ids = llm.tokenizer.eos_ids
        self._engine = llm.fresh_engine(drafters=self._drafters, max_running=max_running)
        self._engine._passes._backend = self._backend

    @property
    def num_prepared(self) -> int:
        """`num_prepared` of its backend."""
        return num_prepared(self._backend)

    def renew(self) -> None:
        """Drafters forget what they have learned: answers above all, which would be drafted from the next time."""
        for drafter in self._drafters.values():
            if isinstance(drafter, Renewed):
                drafter.renew()

    def warm(self, prompts: Sequence[Sequence[int]], arms: Sequence[Arm] = (NONE,)) -> None:
        """Put the prompts' K/V into the cache, that of a draft model too if it drafts a few tokens."""
        for arm in {arm.drafter: arm for arm in arms}.values():
            self.run(prompts, SamplingParams(max_tokens=4, temperature=0.0), arm._replace(tree=None))

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, arm: Arm) -> Run:
        """Generate from all prompts at once."""
        params = params if arm.is_match else replace(params, deterministic=False)
        how = {"eos_ids": self._eos_ids, "is_streamed": False, "batch": new_batch()}
        requests = [Request(p, params, arm.speculation, **how) for p in prompts]
        before, start = self._backend.counts, self._clock()
        ids = [self._engine.add(request) for request in requests]
        found: dict[int, SampleOutput] = {}
        while self._engine.has_work:
            found |= {e.request_id: e.output for e in self._engine.step() if e.output is not None}
        seconds = self._clock() - start
        prompt_len = sum(map(len, prompts)) / len(prompts)
        counts = [now - then for now, then in zip(self._backend.counts, before, strict=True)]
        return Run([found[i] for i in ids], seconds, *counts, prompt_len)


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def speed_up(none: np.ndarray, arm: np.ndarray) -> Interval:
    """Of seconds [rounds, groups] of both, in the same turns: total times, each group's the median of its rounds'.

    The interval is by bootstrap over groups and rounds.
    """
    return _averaged([(none, arm)])


class Chosen(NamedTuple):
    """How something compares with the best of others, each half of the rounds with the best of the other half."""

    names: tuple[str, str]  # for the even rounds, and for the odd ones
    speed_up: Interval


def against_best(others: Mapping[str, np.ndarray], arm: np.ndarray) -> Chosen:
    """Of seconds [rounds, groups]. Whoever is best was not chosen by the rounds that it is compared on, because the
    luckiest of many equals would win there; only a single round judges itself."""
    even, odd = (slice(0, None, 2), slice(1, None, 2)) if len(arm) > 1 else (slice(None), slice(None))

    def best(half: slice) -> str:
        return min(others, key=lambda name: np.median(others[name][half], axis=0).sum())

    names = best(odd), best(even)
    halves = [(others[name][half], arm[half]) for name, half in zip(names, (even, odd), strict=True)]
    return Chosen(names, _averaged(halves))


def _averaged(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Interval:
    """The mean speed-up of pairs (before, after) of seconds [rounds, groups]; groups are the same in all."""
    rng, num_groups = np.random.default_rng(0), pairs[0][0].shape[1]

    def ratios(pair: tuple[np.ndarray, np.ndarray], rounds: np.ndarray, groups: np.ndarray) -> np.ndarray:
        picked = [seconds[rounds[:, :, None], groups[:, None]] for seconds in pair]  # [picks, rounds, groups]
        totals = [np.median(each, axis=1).sum(axis=1) for each in picked]
        return totals[0] / totals[1]

    def drawn(count: int) -> np.ndarray:
        return rng.integers(0, count, (1000, count))

    lengths, some = [len(before) for before, _ in pairs], drawn(num_groups)
    found = np.mean([ratios(p, drawn(n), some) for p, n in zip(pairs, lengths, strict=True)], axis=0)
    every = np.arange(num_groups)[None]
    value = np.mean([ratios(p, np.arange(n)[None], every) for p, n in zip(pairs, lengths, strict=True)])
    return Interval(float(value), *np.quantile(found, [0.025, 0.975]).tolist())


def block_efficiency(runs: Sequence[Run]) -> Interval:
    """Tokens per target pass, with its interval over sequences."""
    return ratio(_tokens_and_passes(runs))


def compared_efficiency(runs: Sequence[Run], others: Sequence[Run]) -> Interval:
    """Tokens per target pass against those of other runs of the same prompts, with its interval over prompts: what
    they have in common, that some are easy, is not in it."""
    counts = np.array([_tokens_and_passes(runs), _tokens_and_passes(others)], float)  # [2, prompts, 2]
    num_prompts = counts.shape[1]
    picks = np.random.default_rng(0).integers(0, num_prompts, (2000, num_prompts))

    def ratios(sums: np.ndarray) -> np.ndarray:  # [2, ..., 2]
        per_pass = sums[..., 0] / sums[..., 1]
        return np.asarray(per_pass[0] / per_pass[1])

    drawn = ratios(counts[:, picks].sum(axis=2))
    return Interval(float(ratios(counts.sum(axis=1))), *np.quantile(drawn, [0.025, 0.975]).tolist())


def _tokens_and_passes(runs: Sequence[Run]) -> list[tuple[int, int]]:
    return [(len(o.token_ids), o.stats.passes + o.stats.fast_passes) for run in runs for o in run.outputs]


def typical(values: Sequence[float]) -> Interval:
    """Their median, with its interval by bootstrap."""
    given = np.array(values)
    drawn = np.median(given[np.random.default_rng(0).integers(0, len(given), (2000, len(given)))], axis=1)
    return Interval(float(np.median(given)), *np.quantile(drawn, [0.025, 0.975]).tolist())


def ratio(pairs: Iterable[tuple[float, float]]) -> Interval:
    """The sum of the first of all pairs by that of the second, with its interval by bootstrap over pairs. Nothing by
    nothing is 0."""
    counts = np.array(list(pairs), float)  # [pairs, 2]
    picks = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
    above, below = counts[picks].sum(axis=1).T
    drawn = above / np.where(below, below, 1.0)
    value = counts[:, 0].sum() / (counts[:, 1].sum() or 1.0)
    return Interval(float(value), *np.quantile(drawn, [0.025, 0.975]).tolist())
