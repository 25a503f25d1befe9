"""Every drafter by name. Adding a drafter is one line here."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.protocol import Backend
from verispec.config import DEFAULTS
from verispec.errors import InputError
from verispec.kv import DRAFT_STORE
from verispec.spec.decode import DecodeConfig, DecodeDrafter, on_cheaper_weights
from verispec.spec.drafter import Drafter
from verispec.spec.grammar import GrammarDrafter
from verispec.spec.growth import DraftModel
from verispec.spec.lookup import NO_LOOK_UP, LookupDrafter
from verispec.spec.model_drafter import ModelDrafter, ModelDrafterConfig, Source
from verispec.spec.none import NoDrafter
from verispec.spec.skip import NOT_TUNED, skip_drafter
from verispec.spec.skip_menu import MAX_DRAFT, SkipMenu
from verispec.spec.speculation import AUTO, GRAMMAR
from verispec.spec.suffix import SuffixConfig, SuffixDrafter
from verispec.types import Accept

SUFFIX_DRAFTER, SKIP_DRAFTER, MODEL_DRAFTER, LOOKUP_DRAFTER = "suffix", "skip", "model", "lookup"
NO_DRAFT_MODEL = "there is no draft model; --draft-model names one"
_MODEL_DRAFT_LEN = _LOOKUP_DRAFT_LEN = 8
_BELIEVED_AGREEMENT = 0.75  # of a draft model, until some of its drafts were judged
_CHEAP_WINDOW_LEN = 8  # the most of `decode` on cheaper weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """What drafters are made of. Those that lack something here draft nothing, and say what.

    `draft_len` is the most nodes of one chain that the user wants, None for each drafter's own default. `backend` and
    its `cost` are for those that run passes, `find_menu` for `skip`, `draft_cost`, T of the second model's passes, for
    `model`. `force` drafts whatever is predicted; without `exits` chains of models never end early. `history_len` and
    `shares_history` are the engine's.
    """

    draft_len: int | None = None
    backend: Backend | None = None
    cost: CostTable | None = None
    find_menu: Callable[[], SkipMenu | None] = lambda: None
    draft_cost: CostTable | None = None
    force: bool = False
    exits: bool = True
    history_len: int = DEFAULTS.history_len
    shares_history: bool = DEFAULTS.shares_history

    def length(self, default: int) -> int:
        return default if self.draft_len is None else self.draft_len

    def config(self, default_len: int) -> ModelDrafterConfig:
        """For a drafter whose chains have so many tokens unless the user says otherwise."""
        return ModelDrafterConfig(max_draft=self.length(default_len), exits=self.exits, force=self.force)


def _decode(setup: DraftSetup) -> Drafter:
    """A length that the user names is that of every window."""
    if setup.backend is not None and setup.backend.limits.fast_weights:
        is_forced = setup.force or setup.draft_len is not None
        config = replace(setup.config(_CHEAP_WINDOW_LEN), exits=False, force=is_forced)
        cost = setup.cost and setup.cost.fast
        return on_cheaper_weights(setup.backend, cost or FLAT_COST, config)
    return DecodeDrafter(DecodeConfig(window_len=setup.length(DecodeConfig().window_len)))


def _skip(setup: DraftSetup) -> Drafter:
    if setup.backend is None:
        return NoDrafter(NOT_TUNED)
    return skip_drafter(setup.backend, setup.find_menu, setup.config(MAX_DRAFT), cost=setup.cost)


def _model(setup: DraftSetup) -> Drafter:
    if setup.backend is None or setup.draft_cost is None:
        return NoDrafter(NO_DRAFT_MODEL)
    model = DraftModel(setup.backend, setup.draft_cost, store=DRAFT_STORE, only_drafts=True)
    source = Source(model, _BELIEVED_AGREEMENT, _BELIEVED_AGREEMENT)
    return ModelDrafter("the draft model", lambda: source, setup.config(_MODEL_DRAFT_LEN))


def _suffix(setup: DraftSetup) -> Drafter:
    """Where the host is far from a device that looks up by itself, rounds for the host's look-ups cost more than they
    find there."""
    is_far = setup.cost is not None and setup.cost.trip > 0
    config = SuffixConfig(
        max_draft=setup.length(SuffixConfig().max_draft),
        max_depth=SuffixConfig().max_depth if setup.backend is None else setup.backend.limits.max_tail,
        history_len=setup.history_len,
        shares_history=setup.shares_history,
        leaves_own_text=setup.backend is not None and setup.backend.limits.looks_up and is_far,
    )
    return SuffixDrafter(config)


def _lookup(setup: DraftSetup) -> Drafter:
    if setup.backend is None or not setup.backend.limits.looks_up:
        return NoDrafter(NO_LOOK_UP)
    return LookupDrafter(setup.length(_LOOKUP_DRAFT_LEN))


DRAFTERS: dict[str, Callable[[DraftSetup], Drafter]] = {
    "none": lambda setup: NoDrafter(),
    SUFFIX_DRAFTER: _suffix,
    LOOKUP_DRAFTER: _lookup,
    GRAMMAR: lambda setup: GrammarDrafter(setup.length(GrammarDrafter.MAX_DRAFT)),
    "decode": _decode,
    SKIP_DRAFTER: _skip,
    MODEL_DRAFTER: _model,
}
DRAFTER_NAMES = (*DRAFTERS, AUTO)


def check_method(method: str) -> None:
    if method not in DRAFTER_NAMES:
        raise InputError(f"unknown drafter {method!r}; known: {', '.join(DRAFTER_NAMES)}")


def default_method(*, looks_up: bool, has_draft_model: bool, accept: Accept, is_forced: bool = False) -> str:
    """The drafter where none is named. A backend that `looks_up` runs bursts of drafted rounds without the host, which
    `suffix` needs for each, so there the policy chooses; not where probabilities judge: `auto` may draft without.
    Where drafts are forced, they are those of the draft model."""
    if looks_up and accept is Accept.MATCH and not (is_forced and has_draft_model):
        return AUTO
    return MODEL_DRAFTER if has_draft_model else SUFFIX_DRAFTER


def make_drafters(setup: DraftSetup | None = None) -> dict[str, Drafter]:
    return {name: make(setup or DraftSetup()) for name, make in DRAFTERS.items()}
