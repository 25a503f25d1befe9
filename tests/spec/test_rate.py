"""Running acceptance: a belief that observations move, old ones fading; of each child by its rank."""

from __future__ import annotations

import random

import pytest

from verispec.spec.rate import Acceptance, EarlyEnds, Rate
from verispec.types import NO_PARENT, Draft, Verdict


def test_without_observations_the_belief_stands() -> None:
    assert Rate(0.7, 10.0, 0.9).value == pytest.approx(0.7)


def test_the_belief_counts_as_so_many_tries() -> None:
    rate = Rate(0.5, 4.0, 1.0)
    for is_accepted in (True, True, False, True):
        rate.observe(is_accepted)
    assert rate.value == pytest.approx((0.5 * 4 + 3) / (4 + 4))


def test_old_tries_fade_with_each_new_one() -> None:
    rate = Rate(0.5, 2.0, 0.5)
    rate.observe(True)
    rate.observe(False)
    assert (rate.accepted, rate.tried) == (0.5, 1.5)
    assert rate.value == pytest.approx((1.0 + 0.5) / (2.0 + 1.5))


@pytest.mark.parametrize("truth", [0.0, 0.25, 0.5, 1.0])
def test_it_finds_the_truth_and_stays_a_probability(truth: float) -> None:
    rate = Rate(0.9, 8.0, 0.98)
    for i in range(400):
        rate.observe(int(i * truth) != int((i + 1) * truth))
        assert 0 <= rate.value <= 1
    assert rate.value == pytest.approx((0.9 * 8 + 50 * truth) / 58, abs=0.03)  # 50 tries are remembered


def test_something_new_halves_what_was_seen() -> None:
    rate = Rate(0.5, 4.0, 1.0)
    for _ in range(8):
        rate.observe(True)
    before = rate.value
    rate.fade()
    assert (rate.accepted, rate.tried) == (4.0, 4.0)
    assert 0.5 < rate.value < before
    for _ in range(60):
        rate.fade()
    assert rate.value == pytest.approx(0.5)


# Of each rank


def test_each_further_child_is_believed_to_catch_a_share_of_what_is_missed() -> None:
    acceptance = Acceptance(0.6)
    assert acceptance.reach(0) == 0.0
    assert acceptance.reach(1) == pytest.approx(0.6)
    assert acceptance.reach(2) == pytest.approx(0.6 + 0.4 * 0.35)
    assert acceptance.reach(3) == pytest.approx(0.6 + 0.4 * 0.35 + 0.4 * 0.65 * 0.35)
    reached = [acceptance.reach(n) for n in range(1, 40)]
    assert reached == sorted(reached)
    assert reached[-1] <= 1.0


TREE = Draft((1, 2, 3, 4, 5), (NO_PARENT, NO_PARENT, 0, 0, 1))


def ranks(draft: Draft, verdict: Verdict) -> list[tuple[float, float]]:
    """What one observation makes the first three ranks: accepted, and tried."""
    acceptance = Acceptance(0.5, memory=1.0)
    acceptance.observe(draft, verdict)
    return [(rate.accepted, rate.tried) for rate in acceptance._ranks[:3]]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ((), [(0, 1), (0, 1), (0, 0)]),  # both children of the root were wrong; the others were never looked at
        ((0,), [(1, 2), (0, 2), (0, 0)]),  # the first, then neither of its own
        ((1,), [(0, 2), (1, 1), (0, 0)]),  # the second, then not its only child
        ((0, 3), [(1, 2), (1, 2), (0, 0)]),
        ((1, 4), [(1, 2), (1, 1), (0, 0)]),
    ],
)
def test_every_node_on_the_path_tells_of_its_children(
    path: tuple[int, ...], expected: list[tuple[float, float]]
) -> None:
    assert ranks(TREE, Verdict(path, 9)) == expected


def test_a_chain_tells_of_first_children_alone() -> None:
    acceptance = Acceptance(0.5, weight=2.0, memory=1.0)
    acceptance.observe(Draft.chain([1, 2, 3, 4]), Verdict((0, 1), 9))
    assert acceptance.reach(1) == pytest.approx((1 + 2) / (2 + 3))  # two accepted, one not, one never tried
    assert acceptance._ranks[1].tried == 0
    acceptance.observe(Draft.chain([1, 2]), Verdict((0, 1), 9))
    assert acceptance.reach(1) == pytest.approx((1 + 4) / (2 + 5))  # the leaf has no child to tell of


def test_more_children_than_ranks_are_no_error() -> None:
    acceptance = Acceptance(0.5)
    acceptance.observe(Draft(tuple(range(40)), (NO_PARENT,) * 40), Verdict((30,), 9))
    assert 0 < acceptance.reach(40) <= 1
    acceptance.observe(Draft(), Verdict((), 9))


def test_whoever_remembers_an_estimate_can_see_that_it_changed() -> None:
    """Noticeably: by more than would change what pays."""
    acceptance = Acceptance(0.5)
    acceptance.observe(Draft.chain([1]), Verdict((0,), 9))
    assert acceptance.version == 0, "one try is a small change"
    seen = []
    for change in (
        *[lambda: acceptance.observe(Draft.chain([1] * 8), Verdict(tuple(range(8)), 9))] * 3,
        acceptance.fade,
    ):
        change()
        seen.append((acceptance.version, acceptance.reach(1)))
    versions = [version for version, _ in seen]
    assert versions == sorted({0, *versions} - {0}), "every change was seen"
    assert len(dict(seen)) == 4


def test_the_estimate_that_a_version_stands_for_is_never_far_off() -> None:
    acceptance = Acceptance(0.5)
    published, version = acceptance.reach(1), acceptance.version
    for _ in range(50):
        acceptance.observe(Draft.chain([1, 2]), Verdict((0, 1), 9))
        if acceptance.version != version:
            published, version = acceptance.reach(1), acceptance.version
        assert abs(acceptance.reach(1) - published) <= 0.02
    assert 3 < version < 50


def chain_of(early: EarlyEnds, chains: list[tuple[int, int, int]]) -> EarlyEnds:
    for matched, drafted, most in chains:
        early.observe(matched=matched, drafted=drafted, most=most)
    return early


def random_chain(rng: random.Random, most: int) -> tuple[int, int, int]:
    """Seven tokens of ten are sure, and 95 % of those are right; of the others 40 % are, and the chain ends there."""
    matched = drafted = 0
    is_right = is_sure = True
    while is_sure and drafted < most:
        is_sure, drafted = rng.random() < 0.7, drafted + 1
        is_right &= rng.random() < (0.95 if is_sure else 0.4)
        matched += is_right
    return matched, drafted, most


def test_chains_that_end_early_promise_what_they_gave() -> None:
    """Tokens and passes by depth, against the same counted by hand. The control takes the chances for independent."""
    rng = random.Random(1)
    chains = [random_chain(rng, 5) for _ in range(6000)]
    early = chain_of(EarlyEnds(0.5, weight=1e-9, memory=1.0), chains)
    for depth in range(1, 6):
        assert early.share(depth) == pytest.approx(sum(d >= depth for _, d, _ in chains) / len(chains), abs=0.02)
        assert early.tokens(depth) == pytest.approx(sum(m >= depth for m, _, _ in chains) / len(chains), abs=0.02)
    assert early.share(3) * early.tokens(1) ** 3 < early.tokens(3) - 0.1


def test_an_end_by_the_longest_length_says_nothing_of_the_next_token() -> None:
    early = chain_of(EarlyEnds(0.5, weight=1e-9, memory=1.0), [(3, 3, 3)] * 20)
    assert early.share(9) == pytest.approx(1.0)
    assert early.tokens(9) == pytest.approx(1.0)
    before = early.version
    chain_of(early, [(0, 0, 3)] * 20)
    assert early.version == before
