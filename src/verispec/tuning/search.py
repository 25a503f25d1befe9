"""Which sub-layers to skip: greedy removal, and Bayesian optimisation from there, for the most tokens a second.

Knows no model: a set is scored by a function that gives its agreement, and costs come from a profile. Nothing here
depends on time or on chance, so the same scores and the same profile give the same sets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verispec.backends.audit import Progress, no_progress
from verispec.backends.protocol import FULL_VIEW, SubLayer, View
from verispec.errors import InputError
from verispec.spec.skip_menu import SkipProfile

Agreement = Callable[[View], float]
THRESHOLD = 0.5  # a coordinate above this skips its sub-layer
_SEED = 1
_NEEDS_OPTUNA = "Bayesian optimisation needs optuna: pip install 'verispec[tune]'"


@dataclass(frozen=True, slots=True)
class Scored:
    """A skip set with its agreement and the best speed-up predicted for it."""

    view: View
    agreement: float
    speedup: float

    @property
    def rank(self) -> tuple[float, float]:
        return self.speedup, self.agreement


@dataclass(frozen=True, slots=True)
class Judge:
    """The objective: predicted committed tokens a second, in those of plain decoding."""

    agreement: Agreement
    profile: SkipProfile

    def score(self, view: View) -> Scored:
        return self.suppose(view, self.agreement(view))

    def suppose(self, view: View, agreement: float) -> Scored:
        return Scored(view, agreement, self.profile.best(view, agreement).speedup)


def removable(num_layers: int) -> tuple[SubLayer, ...]:
    """What may be skipped, in a fixed order: everything but the first and the last layer."""
    return tuple(SubLayer(layer, is_mlp) for layer in range(1, num_layers - 1) for is_mlp in (False, True))


def greedy(
    judge: Judge, num_layers: int, *, width: int, share: float, floor: float, progress: Progress = no_progress
) -> list[Scored]:
    """Remove the sub-layer whose loss hurts least, again and again: nested sets, smallest first.

    The first round tries them all. Later ones try again the `width` whose last known loss of agreement promises most.
    Ends with `share` of all sub-layers removed, or before the set whose agreement is below `floor`.
    """
    left = list(removable(num_layers))
    num_rounds = min(len(left), int(share * 2 * num_layers))
    num_trials = len(left) + max(0, num_rounds - 1) * width
    losses = dict.fromkeys(left, 0.0)
    found: list[Scored] = []
    now, done = judge.score(FULL_VIEW), 0
    for _ in range(num_rounds):
        tried = []
        for sub_layer in left if not found else _most_promising(judge, now, left, losses)[:width]:
            progress(f"greedy removal, {len(found)} sub-layers skipped", done / num_trials)
            scored = judge.score(View(now.view.skipped | {sub_layer}))
            losses[sub_layer] = now.agreement - scored.agreement
            tried.append((sub_layer, scored))
            done += 1
        removed, best = max(tried, key=lambda each: (*each[1].rank, -left.index(each[0])))
        if best.agreement < floor:
            break
        left.remove(removed)
        found.append(best)
        now = best
    progress("greedy removal done", 1.0)
    return found


def _most_promising(
    judge: Judge, now: Scored, left: Sequence[SubLayer], losses: Mapping[SubLayer, float]
) -> list[SubLayer]:
    """Best first, if each lost now what it lost when it was last tried; in their fixed order on a tie."""

    def supposed(sub_layer: SubLayer) -> tuple[float, float]:
        view, agreement = View(now.view.skipped | {sub_layer}), now.agreement - losses[sub_layer]
        return judge.suppose(view, min(1.0, max(0.0, agreement))).rank

    return sorted(left, key=supposed, reverse=True)  # stable, also in reverse


def bayes(
    judge: Judge, num_layers: int, *, warm: Sequence[View], trials: int, progress: Progress = no_progress
) -> list[Scored]:
    """Bayesian optimisation over [0, 1]^n, a coordinate per removable sub-layer, begun from the `warm` sets.

    As many trials beyond those; gives every set tried, in order, each once. Raises InputError without optuna.
    """
    check_optuna()
    import optuna

    names = {f"{'mlp' if s.is_mlp else 'attention'} {s.layer}": s for s in removable(num_layers)}
    if not names:
        return []
    space: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in names
    }
    found: dict[View, Scored] = {}
    with _quiet(optuna):
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=_SEED), direction="maximize")
        for view in warm:
            # In the middle of either half: the sampler looks around the values that were good.
            study.enqueue_trial({name: 0.75 if s in view.skipped else 0.25 for name, s in names.items()})
        for i in range(len(warm) + trials):
            progress("Bayesian optimisation", max(0, i - len(warm)) / max(1, trials))
            trial = study.ask(space)
            view = View(frozenset(names[name] for name, value in trial.params.items() if value > THRESHOLD))
            scored = found.setdefault(view, judge.score(view))
            study.tell(trial, scored.speedup)
    progress("Bayesian optimisation done", 1.0)
    return list(found.values())


def check_optuna() -> None:
    """Raise InputError, naming what to install, where optuna is missing."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise InputError(_NEEDS_OPTUNA) from error


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def best_of_each_size(found: Sequence[Scored], *, count: int) -> list[Scored]:
    """The best set for each number of skipped sub-layers, and of those the `count` best; the earlier one on a tie."""
    best: dict[int, Scored] = {}
    for scored in found:
        size = len(scored.view.skipped)
        if size and (size not in best or scored.rank > best[size].rank):
            best[size] = scored
    return sorted(best.values(), key=lambda s: s.rank, reverse=True)[:count]
