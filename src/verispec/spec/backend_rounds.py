"""Rounds that a backend drafted and judged by itself, cut out of a burst's result: each becomes a turn of its own."""

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import NamedTuple

from verispec.backends.protocol import BurstResult
from verispec.kv import TARGET_STORE
from verispec.sampling.draw import NO_TOKEN
from verispec.spec.turn import NO_ROOM, Recipe, Score, Turn
from verispec.types import NO_PARENT, Draft, Stored, Verdict

_NOTHING: frozenset[int] = frozenset()
_fields_of = attrgetter(*(field.name for field in fields(Turn)))


class _Drafted(NamedTuple):
    """What a round drafted, the places of a tree's nodes, which the drafter has computed, and in how many passes."""

    draft: Draft
    places: list[int]
    computed: frozenset[int]
    num_passes: int


class _Drawn(NamedTuple):
    """Behind the round's first token, and behind each on the path."""

    token_ids: list[int]
    logprobs: list[float]


def rounds_of(turn: Turn, recipe: Recipe, burst: BurstResult, index: int) -> list[Turn]:
    """The turn's rounds, each with a draft and a verdict.

    Draws of the first are the pass's own, one for each row; those of the others stand in the order of their paths.
    """
    tree, found, first, begin = recipe.rule.tree, list[Turn](), 0, 0
    is_stored = recipe.rule.store != TARGET_STORE
    rows, later = turn.score, _Drawn(burst.token_ids[index].tolist(), burst.logprobs[index].tolist())
    for i, (ids, count) in enumerate(zip(burst.drafts[index].tolist(), burst.accepted[index].tolist(), strict=True)):
        if count < 0:
            break
        parents, path = list[int](), list(range(count))
        if tree is not None:
            parents = burst.parents[index, i].tolist()
            draws = later.token_ids[begin : begin + count] if found else rows.draws
            path = _path(ids, parents, draws, by_row=not found)[:count]
        if found:
            drawn = _Drawn(later.token_ids[begin : begin + count + 1], later.logprobs[begin : begin + count + 1])
            begin += count + 1
        else:
            at = [0, *(1 + place for place in path)]
            drawn = _Drawn([rows.draws[j] for j in at], [rows.logprobs[j] for j in at])
        if tree is None:
            drafted = _chain(ids, is_stored=is_stored)
        else:
            drafted = _tree(tree.keep[: max(0, turn.room - first)], ids, parents, turn.sequence.stopping_ids)
        found.append(_round(turn, recipe, first, drafted, path, drawn))
        first += count + 1
    return found


def _path(ids: list[int], parents: list[int], draws: list[int], *, by_row: bool) -> list[int]:
    """The places whose tokens were drawn one after the other; `draws` are of all rows, or those tokens."""
    path = list[int]()
    for place, (token_id, parent) in enumerate(zip(ids, parents, strict=True)):
        last = path[-1] if path else NO_PARENT
        at = 1 + last if by_row else len(path)
        if parent == last and at < len(draws) and token_id == draws[at] >= 0:
            path.append(place)
    return path


def _chain(ids: list[int], *, is_stored: bool) -> _Drafted:
    """The last token never had a row of its own."""
    draft = Draft.chain([token_id for token_id in ids if token_id >= 0])
    computed = frozenset(range(len(draft) - 1)) if is_stored else _NOTHING
    return _Drafted(draft, [], computed, max(1, len(draft)))


def _tree(keep: Sequence[int], ids: list[int], parents: list[int], stopping_ids: Collection[int]) -> _Drafted:
    """Places that are free are no nodes; those of the last level, and behind a stop, were not computed.

    `keep` are the places of each level that could still be committed.
    """
    levels = [level for level, count in enumerate(keep) for _ in range(count)]
    places = [place for place, token_id in enumerate(ids) if token_id >= 0]
    node_of = {place: node for node, place in enumerate(places)} | {NO_PARENT: NO_PARENT}
    draft = Draft(tuple(ids[p] for p in places), tuple(node_of[parents[p]] for p in places))
    computed = [p for p in places if levels[p] + 1 < len(keep) and ids[p] not in stopping_ids]
    return _Drafted(draft, places, frozenset(node_of[p] for p in computed), 1 + len({levels[p] for p in computed}))


def _round(turn: Turn, recipe: Recipe, first: int, drafted: _Drafted, path: list[int], drawn: _Drawn) -> Turn:
    """One round, which began `first` tokens behind the turn."""
    room, store, choice, is_tree = turn.room - first, recipe.rule.store, turn.choice, recipe.rule.tree is not None
    found = Turn(*_fields_of(turn))  # there are many rounds: `dataclasses.replace` would take most of the time
    found.start, found.room, found.num_rounds = turn.start + first, room, 1
    found.draft, found.rounds = drafted.draft, []
    num_before = 0 if first else turn.num_draft_passes  # it was caught up in them
    found.num_draft_passes = num_before + (drafted.num_passes if room > 0 and not recipe.rule.looks_up else 0)
    num_nodes = min(recipe.num_nodes, room) if recipe.rule.tree is None else sum(recipe.rule.tree.keep[: max(0, room)])
    if room <= 0:
        found.choice = NO_ROOM
    elif choice.num_nodes != num_nodes:
        found.choice = choice._replace(num_nodes=num_nodes)
    if store != TARGET_STORE and room > 0:
        found.draft = replace(drafted.draft, stored=Stored(store, found.start + 1, drafted.computed))
    nodes = [drafted.places.index(place) for place in path] if is_tree else path
    found.score, found.verdict = _scored(nodes, drawn), Verdict(tuple(nodes), drawn.token_ids[-1])
    found.path_places = path if is_tree else None
    return found


def _scored(nodes: list[int], drawn: _Drawn) -> Score:
    """Draws by row: the first token's, then the nodes' up to the last on the path."""
    if len(nodes) == max(nodes, default=NO_PARENT) + 1:
        return Score(*drawn)
    score = Score([NO_TOKEN] * (2 + max(nodes)), [0.0] * (2 + max(nodes)))
    for node, token_id, logprob in zip((NO_PARENT, *nodes), *drawn, strict=True):
        score.draws[1 + node], score.logprobs[1 + node] = token_id, logprob
    return score
