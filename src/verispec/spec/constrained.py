"""Drafts under a constraint: cut where it refuses them, with what may be drawn behind each node.

Positions in a grammar are values: those of a draft are forked from the committed one in every round, and nothing is
ever undone.
"""

from dataclasses import replace

from verispec.sampling.constraint import Constraint
from verispec.spec.turn import Drafted, Pending, Places, Recipe
from verispec.types import Draft


def followed(constraint: Constraint, draft: Drafted) -> tuple[Drafted, Places]:
    """The draft, and the places behind the committed tokens and behind each node; or behind a draft that grows.

    A chain ends before the first token that is not allowed. In a tree, and where probabilities judge, such nodes stay:
    their places are None, and no verdict ever reaches them. Raises where the grammar cannot be followed.
    """
    if isinstance(draft, Recipe):
        raise ValueError("a backend cannot draft by itself under a grammar")
    if isinstance(draft, Pending):
        places = _along(constraint, Draft.chain(draft.token_ids))[-1:]
        if places == (None,):
            raise ValueError("the draft under way is not what the grammar allows")
    else:
        if draft.is_chain and not draft.proposals:
            draft = _cut(constraint, draft)
        places = _along(constraint, draft)
    for place in places:
        if place is not None:
            _ = place.allowed  # now: what cannot be computed costs this draft alone
    return draft, places


def _cut(constraint: Constraint, draft: Draft) -> Draft:
    for node, (token_id, before) in enumerate(zip(draft.token_ids, _along(constraint, draft), strict=False)):
        if before is None or not before.allowed[token_id // 32] >> token_id % 32 & 1:
            ids, probabilities = draft.token_ids[:node], draft.probabilities[:node]
            return replace(draft, token_ids=ids, parents=draft.parents[:node], probabilities=probabilities)
    return draft


def _along(constraint: Constraint, draft: Draft) -> Places:
    places: list[Constraint | None] = [constraint]
    for parent, token_id in zip(draft.parents, draft.token_ids, strict=True):
        before = places[parent + 1]
        places.append(None if before is None else before.after(token_id))
    return tuple(places)
