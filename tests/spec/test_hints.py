"""What a client predicts of an answer, one text, several, or a tree: it is drafted from, and changes no token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.tiny_llm import fix_cost, loaded, write_model
from verispec.backends.cost import CostTable
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import MAX_PREDICTED, NO_PARENT, Draft, SampleOutput, SamplingParams

CHEAP_ROWS = CostTable((1, 64), (1.0, 1.1), (0.0, 0.0))
FAMILY = (1, 4, 8, 16, 64)
VOCAB = 64
NUM_TOKENS = 40


def answer(predicted: Any = (), *, seed: int = 0, tree: str | None = None, **fields: Any) -> SampleOutput:
    """Of one request on an engine of its own, whose history is empty."""
    backend = FakeBackend(vocab_size=VOCAB)
    engine = Engine(
        backend, family=FAMILY, drafters=make_drafters(DraftSetup(backend=backend)), cost=CHEAP_ROWS,
        config=EngineConfig(num_slots=256, row_budget=64),
    )  # fmt: skip
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
    speculation = Speculation.of("suffix", tree=tree)
    engine.add(Request([1, 2, 3, 4], params, speculation, prediction_ids=predicted, **fields))
    found = []
    while engine.has_work:
        found += [event.output for event in engine.step() if event.output is not None]
        engine.check()
    (output,) = found
    return output


def tree_of(rows: Sequence[Sequence[int]]) -> Draft:
    """The trie of some rows."""
    token_ids, parents, known = list[int](), list[int](), dict[tuple[int, ...], int]()
    for row in rows:
        for end in range(1, len(row) + 1):
            path = tuple(row[:end])
            if path not in known:
                known[path] = len(token_ids)
                token_ids.append(path[-1])
                parents.append(known.get(path[:-1], NO_PARENT))
    return Draft(tuple(token_ids), tuple(parents))


def alternatives(right: Sequence[int], count: int, rng: random.Random) -> list[list[int]]:
    """Rows that leave the right one at some place, and the right one among them."""
    rows = []
    for _ in range(count - 1):
        at = rng.randrange(len(right) // 2)
        rows.append([*right[:at], (right[at] + 1) % VOCAB, *rng.choices(range(VOCAB), k=len(right) - at - 1)])
    rows.insert(rng.randrange(count), list(right))
    return rows


@pytest.mark.parametrize("tree", [None, "chain:4", "beam:4,6"])
def test_hints_change_no_token_and_a_right_one_is_accepted(tree: str | None) -> None:
    """Alone, among others and as a path of a tree; the control are hints without it, of which little is accepted."""
    rng = random.Random(0)
    for seed in range(6):
        plain = answer(seed=seed, tree=tree)
        rows = alternatives(plain.token_ids, 5, rng)
        wrong = [row for row in rows if row != list(plain.token_ids)]
        for hints in (list(plain.token_ids), np.array(plain.token_ids), [plain.token_ids], rows, tree_of(rows)):
            found = answer(hints, seed=seed, tree=tree)
            assert found.digest == plain.digest
            assert found.stats.accepted > 0.6 * NUM_TOKENS
            assert found.stats.passes < NUM_TOKENS / 2
        for hints in (wrong, tree_of(wrong), [], [[], []], Draft()):
            found = answer(hints, seed=seed, tree=tree)
            assert found.digest == plain.digest
            assert found.stats.accepted < 0.6 * NUM_TOKENS


def test_the_first_alternative_is_tried_first() -> None:
    right = list(answer().token_ids)
    other = [(right[0] + 1) % VOCAB, *right[1:]]
    first, second = (answer(rows, tree="chain:4").stats.passes for rows in ([right, other], [other, right]))
    assert first < second


def test_a_tree_is_its_paths_and_a_row_is_itself() -> None:
    tree = Draft((5, 6, 7, 8, 9), (NO_PARENT, 0, 0, NO_PARENT, 2))
    assert tree.leaves == (1, 3, 4)
    rows = [(Request([1], prediction_ids=given)).predictions for given in (tree, [5, 6], [[5], (), np.array([6, 7])])]
    assert rows == [((5, 6), (8,), (5, 7, 9)), ((5, 6),), ((5,), (6, 7))]
    assert all(type(token_id) is int for row in rows[2] for token_id in row)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([1, VOCAB], f"prediction_ids: token id {VOCAB} is not in the vocabulary of {VOCAB}"),
        ([1, 2.5], "prediction_ids: token id 2.5 is not"),
        ([[1], [2, -1]], r"prediction_ids\[1\]: token id -1 is not"),
        ([[1], 2], r"prediction_ids\[1\] must be a row of token ids, not int"),
        *((odd, "prediction_ids must be token ids, rows of them or a Draft") for odd in ({1}, None, {5: 1})),
        ("ab", r"prediction_ids\[0\]: token id 'a' is not"),
        ([[1]] * 17, "prediction_ids has 17 alternatives; at most 16 are possible"),
        ([1] * (MAX_PREDICTED + 1), "prediction_ids has 32769 tokens; at most 32768 are possible"),
        ([[1] * 20_000] * 2, "prediction_ids has 40000 tokens; at most 32768 are possible"),
        (Draft((1, VOCAB), (NO_PARENT, 0)), f"prediction_ids must be a Draft that is a tree .* vocabulary of {VOCAB}"),
        (Draft((1, 2), (1, 0)), "prediction_ids must be a Draft that is a tree"),
        (Draft((1, 2), (NO_PARENT,)), "prediction_ids must be a Draft that is a tree"),
        (Draft((1,) * 17, (NO_PARENT,) * 17), "prediction_ids has 17 alternatives"),
        (tree_of([[*[1] * 30_000, i] for i in (2, 3)]), "prediction_ids has 60002 tokens"),
    ],
    ids=lambda given: "",
)  # fmt: skip
def test_bad_hints_are_refused_by_name(given: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        answer(given)


def test_python_takes_one_text_or_several_or_a_draft(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with loaded(write_model(tmp_path / "tiny.gguf"), tmp_path, drafter="suffix", history_len=0) as llm:
        fix_cost(llm)
        (plain,) = llm.generate("abc", params, speculative=False)
        ids = list(plain.token_ids)
        draft = tree_of([ids, [*ids[:5], (ids[5] + 1) % 30, 3]])
        for prediction in (plain.text, ids, ["zzz", plain.text], [ids, "zzz"], ("zzz", tuple(ids)), draft):
            (found,) = llm.generate({"prompt": "abc", "prediction": prediction}, params)
            assert found.digest == plain.digest
            assert found.stats.accepted > 12, prediction
        for bad, error in (
            (7, r"prompt\['prediction'\] must be text or token ids, a list of these, or a Draft, not int"),
            (["a", 7], r"prompt\['prediction'\]\[1\] must be text or token ids, not int"),
            ([[1, "b"]], r"prompt\['prediction'\]\[0\]\[1\] must be a token id, a whole number, not str"),
            (["a"] * 17, "prediction_ids has 17 alternatives"),
        ):
            with pytest.raises(InputError, match=error):
                llm.request({"prompt": "abc", "prediction": bad}, params)
