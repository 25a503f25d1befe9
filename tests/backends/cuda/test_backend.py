"""The CUDA backend on a GPU, or its host side on a CPU that stands in for one: conformance, bursts, and the engine's
equality."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.backends import test_bursts as bursts  # noqa: E402
from tests.backends import test_conformance as conformance  # noqa: E402
from tests.backends import test_drafted_bursts as drafted  # noqa: E402
from tests.backends import test_provisions as provisions  # noqa: E402
from tests.backends.cuda import backend_check, chains_check, draw_check, lookup_check, trees_check  # noqa: E402
from tests.backends.cuda import weighing_check as weighing  # noqa: E402
from tests.support import passes  # noqa: E402
from tests.support.cuda_stand_in import EmulatedDraws, StandIn  # noqa: E402
from tests.support.passes import RowsBuilder, Tape  # noqa: E402
from tests.support.skipping import cheap_setup  # noqa: E402
from tests.support.tiny_models import TinyConfig, make_tensors  # noqa: E402
from verispec.backends.cuda import branches  # noqa: E402
from verispec.backends.cuda.backend import CudaBackend, CudaModel  # noqa: E402
from verispec.backends.cuda.branches import Branches  # noqa: E402
from verispec.backends.cuda.compiler import CudaError  # noqa: E402
from verispec.backends.cuda.device import Gpu  # noqa: E402
from verispec.backends.cuda.graphs import Draw, GraphKey  # noqa: E402
from verispec.backends.cuda.quantize import quantized  # noqa: E402
from verispec.backends.cuda.steps import Stage, StepSizes  # noqa: E402
from verispec.backends.protocol import FULL_VIEW, Pass, Wanted  # noqa: E402
from verispec.config import EngineConfig  # noqa: E402
from verispec.engine import Engine, Request  # noqa: E402
from verispec.errors import BackendDeadError, DeviceMemoryError  # noqa: E402
from verispec.kv import DUMP_SLOT  # noqa: E402
from verispec.model import cache_dir  # noqa: E402
from verispec.spec.registry import DraftSetup, make_drafters  # noqa: E402
from verispec.spec.speculation import Speculation  # noqa: E402
from verispec.types import SamplingParams  # noqa: E402

pytestmark = pytest.mark.cuda
# Faults in the sources that stand in for kernels, and looks into them; on a GPU `make gpu-test` has their subjects.
of_the_stand_in = pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU that stands in for a GPU")


GEMMA = {"num_layers": 3, "window": 21, "tied_head": True}


def stand_in(family: str, backend: type[CudaBackend] = CudaBackend, **steps: object) -> CudaBackend:
    changes = GEMMA if family == "gemma3" else {}
    configs = [TinyConfig(family=family, seed=seed, context_len=256, **changes) for seed in (1, 2)]
    models = [CudaModel(c.architecture, make_tensors(c).__getitem__) for c in configs]
    device = Gpu(0, cache_dir() / "cuda") if torch.cuda.is_available() else StandIn(**steps)
    return backend(models, device=device, num_slots=conformance.NUM_SLOTS, num_seq_rows=8, max_tail=32)


@pytest.fixture(params=["llama", "qwen2", "qwen3", "gemma3"])
def backend(request: pytest.FixtureRequest) -> CudaBackend:
    return stand_in(request.param)


@pytest.fixture
def family(backend: CudaBackend) -> tuple[int, ...]:
    return (1, 4, 16, 64, 256)


@pytest.fixture
def make():
    return lambda: stand_in("llama")


test_chunks = conformance.test_chunks_and_shapes_do_not_matter
test_neighbours = conformance.test_neighbours_and_index_do_not_matter
test_siblings = conformance.test_a_tree_row_does_not_see_its_sibling
test_views = conformance.test_views
test_stores = conformance.test_stores_share_slot_ids_and_nothing_else
test_recycled = conformance.test_recycled_rows_and_slots_keep_nothing
test_wanted = conformance.test_wanted_results_agree
test_children = conformance.test_children_are_those_of_the_shared_code
test_distributions = conformance.test_a_distribution_lives_until_it_is_released
test_stable = conformance.test_results_are_stable
test_bad_arrays = conformance.test_bad_arrays_raise
test_from_state = bursts.test_a_burst_goes_on_from_where_the_last_left_it
test_ended_rows = bursts.test_an_ended_row_disturbs_nobody_and_writes_nothing
test_the_tables_end = bursts.test_a_burst_ends_with_the_table
test_bad_bursts = bursts.test_bad_bursts_raise
test_masks = provisions.test_masks_decide_what_is_drawn_and_nothing_else
test_nothing_allowed = provisions.test_where_nothing_is_allowed_nothing_is_drawn
test_masks_that_do_not_fit = provisions.test_masks_that_do_not_fit_are_refused
test_hidden = provisions.test_hidden_states_are_those_of_a_reference
test_hidden_stay = provisions.test_hidden_states_stay_while_others_are_made
test_hidden_start = provisions.test_a_row_may_start_from_a_hidden_state
test_three_drafters = drafted.test_three_drafters_and_none_in_one_burst


def test_trees_end_with_the_table() -> None:
    """No place behind it is read, whoever drafts."""
    drafted.test_trees_end_with_the_table(alone)
    drafted.test_trees_end_with_the_table(hosted)


@of_the_stand_in
def test_a_place_behind_the_table_is_noticed() -> None:
    """The control reads one."""
    fault = "chains.cu", "record[kLength] + m.lengths[s] <= a.table_width", "true"
    with pytest.raises(AssertionError):
        drafted.test_trees_end_with_the_table(partial(alone, changes=(fault,)))


class Alone(CudaBackend):
    """A backend whose host takes part in nothing."""

    def _sampled_by_hand(self, pass_, lane):
        raise AssertionError("the host took part")


def alone(**changes: object) -> CudaBackend:
    return stand_in("llama", backend=Alone, **changes)


def four_rounds(backend: CudaBackend, drafter: str, limits: str) -> list[list[drafted.Round]]:
    return drafted.Drafted(backend, drafter, names=drafted.NO_EDITS, limits=limits).rounds(list(range(8)), 4)


def hosted() -> CudaBackend:
    """Bursts by the loop of `backends/rounds.py`, penalties by the host."""
    backend = stand_in("llama")

    def started(pass_, lane):
        has_edits = backend.resident.has_edits[pass_.rows.seq_rows].any()
        return None if pass_.burst or has_edits else CudaBackend._started(backend, pass_, lane)

    backend._started = started
    return backend


def by_the_host(drafter: str, limits: str) -> list[list[drafted.Round]]:
    return four_rounds(hosted(), drafter, limits)


@pytest.mark.parametrize("limits", list(bursts.LIMIT_SETS))
@pytest.mark.parametrize("drafter", ["skip", "model", "lookup"])
def test_drafted_bursts_need_no_host(drafter: str, limits: str) -> None:
    """A burst of n drafted rounds is n single ones and n of the host's, bit for bit, whatever order threads run in."""
    drafted.test_a_burst_is_its_rounds(alone, drafter, drafted.NO_EDITS, limits)
    expected = by_the_host(drafter, limits)
    assert four_rounds(alone(), drafter, limits) == expected
    assert four_rounds(alone(backwards=True), drafter, limits) == expected
    drafted.test_a_burst_goes_on_from_where_the_last_left_it(alone, drafter, drafted.NO_EDITS, limits)


@pytest.mark.parametrize("limits", list(bursts.LIMIT_SETS))
def test_bursts_with_penalties_need_no_host(limits: str) -> None:
    """Penalties, bias and least lengths: single passes by the device, and by the host, draw the same."""
    bursts.test_a_burst_is_its_rounds(alone, limits)
    drafted.test_a_burst_is_its_rounds(alone, "model", (), limits)
    found = bursts.drawn_by(bursts.Driven(alone(), limits=bursts.LIMIT_SETS[limits]).first_pass(bursts.ROUNDS))
    driven = bursts.Driven(hosted(), limits=bursts.LIMIT_SETS[limits])
    assert bursts.drawn_by(driven.first_pass(bursts.ROUNDS)) == found


FAULTS = {
    "every draft is accepted": ("chains.cu", "== tokens[accepted]) ++accepted", ">= 0) ++accepted"),
    "stops do not end": ("chains.cu", "ended |= !goes_on(record, tokens[n], length + 1 + n)", "ended |= tokens[n] < 0"),
    "no early end": ("chains.cu", "a.logprobs[i] >= pass.least_logprob &&", ""),
    "another slot": ("chains.cu", "record[kNext], position + n,", "record[kNext], position + n + 1,"),
}
FAULTS_OF_GOING_ON = {
    "the host's word for it": ("chains.cu", "if (m.tokens[s] >= 0) record", "record"),
    "whoever has ended goes on": ("chains.cu", "round <= m.rounds[s] && record[kNext] >= 0", "round <= m.rounds[s]"),
}
FAULTS_OF_LOOKING_UP = {
    "the first time": ("chains.cu", "n << kPositionBits | position", "n << kPositionBits | (last - position)"),
    "two are enough": ("chains.cu", "constexpr int kMost = 4", "constexpr int kMost = 2"),
    "behind the end": ("chains.cu", "min(end, last + 1 - first)", "end"),
    "the last token is an old one": ("chains.cu", "position < last ?", "position <= last ?"),
    "stops do not end": ("chains.cu", "if (!goes_on(record, drafted, last + 2 + i)) atomicMin(&end, i + 1);", ""),
}


@of_the_stand_in
def test_a_fault_in_the_chains_is_noticed() -> None:
    """The control."""
    for drafter, limits, faults in (("skip", "some near", FAULTS), ("lookup", "none near", FAULTS_OF_LOOKING_UP)):
        expected = by_the_host(drafter, limits)
        for fault in faults.values():
            assert four_rounds(alone(changes=(fault,)), drafter, limits) != expected, fault
    for fault in FAULTS_OF_GOING_ON.values():
        with pytest.raises((AssertionError, IndexError)):
            drafted.test_a_burst_goes_on_from_where_the_last_left_it(
                partial(alone, changes=(fault,)), "skip", drafted.NO_EDITS, "some near"
            )


FAULTS_OF_IDLING = {
    "nobody has rows": ("chains.cu", "has_rows = __syncthreads_or(has_rows);", "has_rows = false;"),
    "what verifies has no rows": ("chains.cu", "has_rows |= goes;", ""),
    "drafts have no rows": ("chains.cu", "has_rows |= drafts;", ""),
}


@of_the_stand_in
def test_products_nobody_wants_are_left_out() -> None:
    """A burst of more rounds than its sequences have tokens left: passes behind the last one, and those that would
    draft behind an early end, have no rows, and what stands in the place of their results changes nothing. Faults are
    noticed."""
    near = [i for i, limit in enumerate(bursts.LIMIT_SETS["some near"]) if limit < max(bursts.LIMIT_SETS["some near"])]
    for drafter in ("skip", "model"):
        backend = alone()
        seen = watched(backend)
        found, expected = (
            drafted.Drafted(made, drafter, names=drafted.NO_EDITS, limits="some near").rounds(near, 12)
            for made in (backend, hosted())
        )
        assert found == expected
        assert {0, 1} <= set(seen)
        assert seen[-1] == 0, "somebody still went on: no control"
    expected = by_the_host("skip", "some near")
    for name, fault in FAULTS_OF_IDLING.items():
        found = None
        with suppress(IndexError):  # a token that was never drawn
            found = four_rounds(alone(changes=(fault,)), "skip", "some near")
        assert found != expected, name


def watched(backend: CudaBackend) -> list[int]:
    """What passes of this backend are told of their rows, one by one."""
    seen, graphs = list[int](), backend._graphs
    run = graphs._round

    def observed(key: GraphKey) -> None:
        run(key)
        seen.append(int(backend._state.busy))

    graphs._round = observed
    return seen


def refused(library: object) -> None:
    raise CudaError("CUDA refused a call")


@pytest.mark.parametrize(
    "changes",
    [{"runtime_library": lambda: None}, {"_driver_version": lambda: 12030}, {"_bindings": lambda: 12}, {}],
    ids=["no library", "an old driver", "old bindings", "a library that cannot be linked"],
)
def test_where_there_are_no_conditional_nodes_work_runs_in_any_case(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    found = {"runtime_library": lambda: Path("library"), "_driver_version": lambda: 13000, "_bindings": lambda: 13}
    found |= {"_linked": refused}
    for name, stand_in_ in (found | changes).items():
        monkeypatch.setattr(branches, name, stand_in_)
    ran = []
    there = Branches()
    there.only_if(torch.zeros(1), lambda: ran.append(1))
    assert ran == [1]
    assert not there.are_there
    assert not alone().limits.leaves_out, "the policy counts such steps in full"


TREE_FAULTS = {
    "beam:2,3": {
        "every child is accepted": ("chains.cu", "token != drawn || parent", "parent"),
        "slots stay where they are": ("chains.cu", "slots[place] = slots[accepted], slots[accepted] = slot;", ""),
        "levels that see no path": ("trees.cu", "*--tail = slots[p]", "*--tail = slots[place]"),
        "no order": ("trees.cu", "&& time < best)", "&& at < 0)"),
        "a race": ("trees.cu", "? kRace : kLikely", "? kRace : kRace"),
        "gaps alone": ("trees.cu", "gap + log_of_all", "gap"),
    },
    "branch:3,2": {
        "nobody's children": ("trees.cu", "c.parents[at] = parent.place", "c.parents[at] = -1"),
        "one child each": ("trees.cu", "pass.place + j, 0.0", "pass.place + j / k * k, 0.0"),
        "levels behind the end": ("trees.cu", "&& pass.token + 1 < most_drafted(record, m.lengths[s])", ""),
    },
}


@of_the_stand_in
def test_trees_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grown by captured graphs alone, by every rule: tokens, log-probabilities and counters. A fault is noticed."""
    monkeypatch.setattr(backend_check, "FAILED", [])
    how = {"max_tokens": 16, "num_requests": 3}
    trees_check.check_trees(StandIn(backwards=True), ["branch:3,2", "branch:2"], ["model"], **how)
    trees_check.check_trees(StandIn(), ["beam:2,3"], ["skip"], ["match"], **how)
    assert backend_check.FAILED == []


@of_the_stand_in
def test_only_what_the_target_draws_can_break_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control marks sequences for whatever was drafted for them."""
    monkeypatch.setattr(backend_check, "FAILED", [])
    trees_check.check_poison(StandIn(), max_tokens=8, num_requests=8)
    assert backend_check.FAILED == []
    whole = "for (int i = 0; i < prefix_len; ++i)"
    changed = StandIn(changes=(("chains.cu", whole, whole.replace("prefix_len", "prefix_len + 3")),))
    trees_check.check_poison(changed, max_tokens=8, num_requests=8)
    assert any("chain" in failed for failed in backend_check.FAILED)


def drafted_tree(backend: CudaBackend, tree: str) -> list[trees_check.Told] | None:
    """None: the engine noticed by itself."""
    asked = trees_check.requests(Speculation.of("model", tree=tree), seed=1, max_tokens=20)[1:2]
    with suppress(ValueError, IndexError):
        return trees_check.told(trees_check.engine_of(backend, max_burst=4), asked)
    return None


@of_the_stand_in
def test_a_fault_in_the_trees_is_noticed() -> None:
    """The control; and the loop of `backends/rounds.py` gives the same."""

    def make(*changes: tuple[str, str, str]) -> CudaBackend:
        return backend_check.make("llama", StandIn(changes=changes))

    for tree, faults in TREE_FAULTS.items():
        expected = drafted_tree(trees_check.unassisted(make()), tree)
        assert expected is not None
        assert drafted_tree(trees_check.looped(make()), tree) == expected
        for name, fault in faults.items():
            assert drafted_tree(make(fault), tree) != expected, name


WEIGHING_FAULTS = {
    "every child is accepted": ("p_x) < q_x)", "p_x) >= 0.0)"),
    "coins of other nodes": ("stream_of(kCoin, number)", "stream_of(kCoin, number + 1)"),
    "places are counted": ("const int number = next++;", "const int number = n;"),
    "p keeps what was rejected": ("p[i] = id == token ? 0.0 : v.p", "p[i] = v.p"),
    "q loses nothing": ("if (q_left > kNothing) q_sums = sums;", ""),
    "other neighbours": ("step < 32; step *= 2) v", "step < 16; step *= 2) v"),
    "one chunk": (
        "const int first_id = kLeaves * descend(nodes, rest)",
        "const int first_id = 0 * descend(nodes, rest)",
    ),
    "raw logits": ("w.totals[2 * head + 1])", "0.0f)"),
}


@of_the_stand_in
def test_the_kernel_judges_by_probabilities_as_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, log-probabilities and paths, of chains and trees with places left free, in vocabularies of one part and
    of several. The controls are faults in the kernel."""
    monkeypatch.setattr(backend_check, "FAILED", [])
    monkeypatch.setattr(weighing, "FAILED", backend_check.FAILED)
    with np.errstate(all="ignore"):
        assert weighing.check_shares(partial(EmulatedDraws, backwards=True), "cpu", (320, 5000)) == 0
        for backwards in (False, True):
            weighing.check_kernel(StandIn(backwards=backwards).steps(), "cpu")
        assert backend_check.FAILED == []
        for name, (old, new) in WEIGHING_FAULTS.items():
            steps = StandIn(changes=(("weighing.cu", old, new),)).steps()
            weighing.check_kernel(steps, "cpu", num_cases=6, what=f"{name}: ")
            assert backend_check.FAILED[-1:] == [f"{name}: rounds judged by the kernel and by numpy"], name


@of_the_stand_in
@pytest.mark.parametrize(
    ("tree", "drafter", "num_requests"),
    [("chain:3", "skip", 8), ("chain:3", "model", 8), ("branch:3,2,1", "model", 8), ("branch:2,2", "skip", 4),
     ("beam:3,3", "skip", 5), ("beam:3,3", "model", 8)],
)  # fmt: skip
def test_rounds_by_probabilities_are_those_of_the_host(
    tree: str, drafter: str, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With filters and penalties, through stops, several rounds at once, together, ahead, and where slots are short."""
    monkeypatch.setattr(backend_check, "FAILED", [])
    device = StandIn(backwards=tree.startswith("b"))
    weighing.check_rounds(device, [tree], [drafter], max_tokens=18, num_requests=num_requests)
    assert backend_check.FAILED == []


@of_the_stand_in
@pytest.mark.parametrize(("drafter", "seed"), [("skip", 8), ("model", 3)])
def test_trees_of_one_node_are_planned_alike_where_slots_are_short(
    drafter: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host sees a chain, the device places that may have moved, so its table is sent again: whose drafts have slots
    does not depend on that."""
    monkeypatch.setattr(backend_check, "FAILED", [])
    host, alone = trees_check.hosted(backend_check.make("llama", StandIn())), backend_check.make("llama", StandIn())
    how = Speculation.of(drafter, tree="branch:2", accept="recursive")
    with np.errstate(all="ignore"):
        weighing.check_short_of_slots(drafter, host, alone, weighing.requests(how, seed=seed, max_tokens=30))
    assert backend_check.FAILED == []


@of_the_stand_in
def test_what_is_not_finite_ends_the_same_under_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_check, "FAILED", [])
    weighing.check_poison(StandIn(), max_tokens=8, num_requests=8)
    assert backend_check.FAILED == []


FAULTS_OF_WEIGHING = {
    "chain:3": {
        "the target's noise": ("chains.cu", "weighed ? stream_of(kDraftNoise, 1 + node) : 0", "0"),
        "noise of the position": ("chains.cu", "weighed ? length : -1", "-1"),
        "another row's distribution": ("chains.cu", "m.base[s] + pass.token : 0)", "m.base[s] : 0)"),
        "whatever is drawn is accepted": ("chains.cu", "c.most[s] : m.lengths[s]", "0 : m.lengths[s]"),
    },
    "branch:3,2": {
        "cousins share noise": ("trees.cu", "weighed ? stream_of(kDraftNoise, 1 + node) : 0", "weighed ? 2 : 0"),
        "another row's distribution": ("trees.cu", "drafts ? m.base[s] + 1 + place : 0", "m.base[s]"),
    },
}  # fmt: skip


@of_the_stand_in
def test_a_fault_in_rounds_by_probabilities_is_noticed() -> None:
    """The control."""

    def found(tree: str, *changes: tuple[str, str, str]) -> list[trees_check.Told] | None:
        backend = backend_check.make("llama", StandIn(changes=changes))
        how = Speculation.of("model", tree=tree, accept=weighing.rule_of(tree))
        asked = weighing.requests(how, seed=1, max_tokens=20)[:2]
        with suppress(ValueError, IndexError):
            return trees_check.told(weighing.engine_of(backend, max_burst=4), asked)
        return None

    for tree, faults in FAULTS_OF_WEIGHING.items():
        expected = found(tree)
        assert expected is not None
        for name, fault in faults.items():
            assert found(tree, fault) != expected, name


@of_the_stand_in
def test_without_the_limit_the_host_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back: one constant."""
    monkeypatch.setattr("verispec.backends.cuda.backend.JUDGES_BY_PROBABILITY", False)
    backend = weighing.watched(backend_check.make("llama", StandIn()))
    how = Speculation.of("skip", tree="chain:3", accept="rejection")
    asked = weighing.requests(how, seed=1, max_tokens=10)[:1]
    trees_check.told(weighing.engine_of(backend, max_burst=4), asked)
    assert backend.num_shown > 2


@pytest.mark.parametrize("shape_of_tree", ["binary", "random"])
def test_tree_rows_equal_plain_decoding(shape_of_tree: str) -> None:
    conformance.test_tree_rows_equal_plain_decoding(stand_in("llama"), shape_of_tree)


@of_the_stand_in
def test_what_the_gpu_check_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_check, "FAILED", [])
    for module in (chains_check, lookup_check):
        monkeypatch.setattr(module, "FAILED", backend_check.FAILED)
    checks = [getattr(backend_check, f"check_{name}") for name in ("bursts", "draws", "masks", "not_finite")]
    for check in (*checks, chains_check.check_chains, lookup_check.check_look_up):
        check("qwen3", StandIn())
    assert backend_check.FAILED == []


@of_the_stand_in
def test_draws_by_the_kernels_are_those_of_plain_numpy() -> None:
    """By their own source, whose threads run one after the other, the last one first. 5000 nearly equal ids are more
    than the list of a filter holds."""
    with np.errstate(all="ignore"):
        assert draw_check.check_draws(partial(EmulatedDraws, backwards=True), "cpu", (5000,)) == 0


@of_the_stand_in
def test_a_fault_between_rounds_is_noticed() -> None:
    """The control: a device that forgets stops or limits."""

    def driven(*changes: tuple[str, str, str]) -> backend_check.Driven:
        backend = backend_check.make("qwen3", StandIn(changes=changes), models=1)
        return backend_check.Driven(backend, [0, 1, 2, 1, 1], [200, 200, 200, 200, 9])

    expected = driven().one_by_one(17)
    assert backend_check.drawn([driven().start(17)]) == expected
    for old, new in (("going &= token != record[kStops + i]", "going &= true"), ("length < record[kLimit]", "true")):
        assert backend_check.drawn([driven(("steps.cu", old, new)).start(17)]) != expected, old


@of_the_stand_in
@pytest.mark.parametrize("is_memory", [True, False])
def test_a_failed_device_is_dead_and_memory_that_ran_out_is_not(is_memory: bool) -> None:
    class Failing(StandIn):
        fails = False

        def capture(self, work):
            if self.fails:
                raise torch.OutOfMemoryError("no room") if is_memory else torch.AcceleratorError("illegal access")
            return super().capture(work)

    config, device = TinyConfig(context_len=256), Failing()
    backend = CudaBackend(
        [CudaModel(config.architecture, make_tensors(config).__getitem__)], device=device, num_slots=50, num_seq_rows=2
    )
    expected = Tape(backend, seq_row=1, first_slot=0).feed([1, 2, 3], shape=4)
    device.fails = True
    with pytest.raises(DeviceMemoryError if is_memory else BackendDeadError):
        Tape(backend, seq_row=1, first_slot=0).feed([1] * 20, shape=32)  # another size: another capture
    device.fails = False
    if is_memory:
        assert (Tape(backend, seq_row=1, first_slot=0).feed([1, 2, 3], shape=4) == expected).all()
    else:
        with pytest.raises(BackendDeadError, match="illegal access"):
            Tape(backend, seq_row=1, first_slot=0).feed([1, 2, 3], shape=4)


@pytest.mark.parametrize(
    ("stage", "sizes", "more"),
    [
        (Stage.PASS, StepSizes(16, 8), {}), (Stage.PASS, StepSizes(8, 8, is_round=True), {}),
        (Stage.FIRST, StepSizes(16, 16), {"weighed": 32}), (Stage.DRAFT, StepSizes(4, 4), {"store": 1}),
        (Stage.DRAFT, StepSizes(8, 4), {"store": 1, "weighed": 32}),
        (Stage.ROOT, StepSizes(8, 4), {"store": 1, "children": 2}),
        (Stage.LEVEL, StepSizes(8, 8), {"store": 1, "children": 2}), (Stage.VERIFY, StepSizes(16, 16), {"weighed": 32}),
    ],
)  # fmt: skip
def test_the_run_before_a_capture_has_no_rows_of_earlier_passes(
    stage: Stage, sizes: StepSizes, more: dict[str, int]
) -> None:
    """They would write K and V, and their contexts may be longer than those that the launch has blocks for."""
    backend = stand_in("llama")
    inputs = backend._state.inputs
    for values, stale in ((inputs.positions, 255), (inputs.prefix_lens, 256), (inputs.slots, 5), (inputs.seq_rows, 1)):
        values.fill_(stale)
    key = GraphKey(0, FULL_VIEW, sizes, sizes.rows, 1, Draw.PLAIN, stage=stage)._replace(**more)
    with backend._device.current():
        backend._graphs.get(key)
    assert (inputs.slots[: sizes.rows] == DUMP_SLOT).all()
    assert not inputs.positions[: sizes.rows].any()
    assert not any(model.k[:, 5].any() for model in backend._models)


def test_many_rows_with_logits_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = stand_in("llama")
    expected = Tape(backend, seq_row=1, first_slot=0).feed(conformance.PROMPT[:20], shape=32)
    monkeypatch.setattr("verispec.backends.cuda.backend.MAX_HEAD_ROWS", 8)
    backend = stand_in("llama")
    assert (Tape(backend, seq_row=1, first_slot=0).feed(conformance.PROMPT[:20], shape=32) == expected).all()
    assert max(key.sizes.head_rows for key in backend._graphs._graphs) == 8


def test_rows_that_nobody_wants_end_with_the_last_keys_and_values() -> None:
    """Of a prompt's last layer only K and V are of use, but for rows whose logits are wanted; nothing else changes."""
    backend, seen = stand_in("llama"), []
    kernels, prompt, behind = backend._models[0].kernels, (conformance.PROMPT * 9)[:60], conformance.PROMPT[:3]
    gate_up = kernels.gate_up
    kernels.gate_up = lambda layer, b, rows, **how: (seen.append(rows), gate_up(layer, b, rows, **how))

    def fed(seq_row: int, wanted: list[int]) -> tuple[np.ndarray, np.ndarray]:
        tape, rows = Tape(backend, seq_row=seq_row, first_slot=70 * (seq_row - 1)), RowsBuilder()
        _, update = tape.add_prompt_rows(rows, prompt)
        seen.clear()
        found = passes.run_logprobs(tape, rows, wanted, update, shape=64) if wanted else np.zeros((0, 1))
        if not wanted:
            passes.run(tape, rows, Wanted(), update, shape=64)
        return found, tape.feed(behind, shape=64)  # which sees the K and V of all rows

    every, more = fed(1, list(range(60)))
    num_layers = len(backend._models[0].layers)
    assert seen[:num_layers] == [seen[0]] * num_layers
    some, more_of_some = fed(2, [7, 59])
    assert (some == every[[7, 59]]).all()
    assert (more_of_some == more).all()
    assert 2 <= seen[num_layers - 1] < seen[0]
    _, more_of_none = fed(3, [])
    assert (more_of_none == more).all()
    assert seen.count(seen[0]) == 2 * (num_layers - 1), "before the capture and in it"


def test_groups_that_leave_nothing_to_merge_need_no_room_for_it() -> None:
    """With the room of 8B shapes: 4,096 rows of prompts with contexts of 4,096, and what is not so."""
    backend = stand_in("llama")
    backend._max_row_spans = 33272
    key = GraphKey(0, FULL_VIEW, StepSizes(4096, 32, 300), 32, 16, Draw.PLAIN)
    for is_whole, single, expected in ((True, 32, True), (False, 32, False), (True, 4096, False)):
        backend._models[0].kernels.attends_whole = lambda num_groups, spans, found=is_whole: found
        assert backend._fits(key._replace(single=single)) is expected


REQUESTS = [
    {}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_k": 6, "seed": 6},
    {"temperature": 1.0, "n": 2, "seed": 7}, {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 8},
    {"logprobs": 2}, {"temperature": 1.0, "top_p": 0.7, "seed": 9}, {"temperature": 1.0, "min_tokens": 9, "seed": 10},
    {"prompt_logprobs": 1},
]  # fmt: skip
COUNTED = ("passes", "fast_passes", "draft_passes", "drafted", "accepted", "chosen")
WAYS = {
    "batch": {"max_burst": 1}, "bursts": {"max_burst": 6}, "two flights": {"depth": 2, "max_burst": 5},
    "preemption": {"depth": 2, "num_slots": 90, "prefix_cache": False}, "chunks": {"depth": 2, "row_budget": 16},
    "suffix": {"depth": 2}, "skip": {"depth": 2, "max_burst": 6}, "model": {"depth": 2, "max_burst": 6},
    "trees": {"depth": 2, "max_burst": 6}, "lookup": {"depth": 2, "max_burst": 6},
}  # fmt: skip


def test_the_engine_gives_the_same_whatever_runs_beside() -> None:
    """Alone or in a batch, by bursts and flights, with drafts, after preemption, from a warm cache; every parameter."""
    backend = stand_in("llama")
    requests = [
        Request(conformance.PROMPT[3 * i :][: 9 + 5 * i], SamplingParams(max_tokens=20, **more), eos_ids=(3,))
        for i, more in enumerate(REQUESTS)
    ]

    def outputs(engine: Engine, chosen: list[Request], method: str = "none") -> list[str]:
        tree = "branch:2,2" if method == "trees" else None
        speculation, found = Speculation.of("model" if tree else method, tree=tree), {}
        ids = [engine.add(replace(r, speculation=speculation, is_streamed=False)) for r in chosen]
        while engine.has_work:
            for event in engine.step():
                if event.output is not None:
                    found[event.request_id, event.sample_index] = event.output.digest
        engine.check()
        return [found[i, n] for i, r in zip(ids, chosen, strict=True) for n in range(r.params.n)]

    def make(**changes: object) -> Engine:
        config = EngineConfig(**{"num_slots": conformance.NUM_SLOTS, "max_running": 8, **changes})
        drafters = make_drafters(cheap_setup(backend, draft_len=3))
        return Engine(backend, family=(1, 4, 16, 64, 256), drafters=drafters, config=config)

    alone = [digest for request in requests for digest in outputs(make(max_burst=1, prefix_cache=False), [request])]
    assert len(set(alone)) > len(requests) // 2
    for name, changes in WAYS.items():
        engine = make(**changes)
        method = name if name in ("suffix", "skip", "model", "trees", "lookup") else "none"
        assert outputs(engine, requests, method) == alone, name
        assert outputs(engine, requests[::-1], method)[-1] == alone[0], name  # the cache is warm
    # What drafted rounds count is the same in a burst and one by one.
    for method in ("skip", "model"):
        counted = []
        for max_burst in (1, 6):
            engine = make(max_burst=max_burst, prefix_cache=False)
            engine.add(replace(requests[1], speculation=Speculation.of(method)))
            events = [event for _ in iter(lambda e=engine: e.has_work, False) for event in engine.step()]
            counted.append([e.output.stats for e in events if e.output is not None])
        single, several = ([[getattr(s, name) for name in COUNTED] for s in each] for each in counted)
        assert single == several, method
        assert counted[0][0].drafted > counted[0][0].accepted > 0
    # The control: another seed.
    other = [replace(r, params=replace(r.params, seed=99)) for r in requests]
    assert outputs(make(), other) != alone


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantised_weights_stand_for_nearly_the_same(kind: str) -> None:
    """Whole numbers are apart by one step of their group; floats by an eighth of themselves, or less."""
    w = torch.randn(48, 192, generator=torch.Generator().manual_seed(4)).bfloat16()
    w[5, 64:96] = 0
    w[6, 64:96] *= torch.logspace(0, -8, 32)
    found = quantized(w, kind)
    assert found.words.numel() * 4 == found.values.numel() * 4 + found.scales.numel() * 2
    most = w.float().view(48, -1, 32).abs().amax(-1, keepdim=True)
    step = most / 2 ** (found.bits - 1)
    if found.is_float:
        step = torch.maximum(w.float().view(48, -1, 32).abs() / 8, most / 2**17)
    error = (found.dense() - w.float()).view(48, -1, 32).abs()
    cut = 0.51 if found.is_float else 1.2  # the largest whole one may be cut off where that is better for the others
    assert (error <= cut * step + 1e-6).all()
    assert (error <= 0.51 * step + 1e-6).float().mean() > 0.9


@of_the_stand_in
@pytest.mark.parametrize(("kind", "most_accepted"), [("int4", 0.95), ("fp8", 0.99)])
def test_windows_drawn_by_fast_weights_change_no_output(
    kind: str, most_accepted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bits draw other tokens, which are replaced; whoever is not replayed is served by the weights themselves."""
    config = TinyConfig(mlp_size=128, context_len=256)
    model = CudaModel(config.architecture, make_tensors(config).__getitem__)
    sizes = {"device": StandIn(), "num_slots": conformance.NUM_SLOTS, "num_seq_rows": 8}
    exact, cheap = CudaBackend([model], **sizes), CudaBackend([model], **sizes, draft_weights=kind)
    requests = [
        Request(conformance.PROMPT[5 * i :][:12], SamplingParams(max_tokens=24, seed=i, temperature=i % 2, **more))
        for i, more in enumerate(({}, {}, {"deterministic": False}, {"top_k": 5}, {"logprobs": 1}, {}))
    ]

    def run(backend: CudaBackend, method: str) -> tuple[list[list[int]], list[Pass], float]:
        passes, found = [], {}
        watched = SimpleNamespace(**{n: getattr(backend, n) for n in dir(backend) if not n.startswith("_")})
        watched.submit = lambda pass_: passes.append(pass_) or backend.submit(pass_)
        drafters = make_drafters(DraftSetup(draft_len=4, backend=backend))
        sizes = EngineConfig(num_slots=conformance.NUM_SLOTS, max_running=8)
        engine = Engine(watched, family=(1, 4, 16, 64, 256), drafters=drafters, config=sizes)
        for request in requests:
            engine.add(replace(request, speculation=Speculation.of(method), is_streamed=False))
        while engine.has_work:
            for event in engine.step():
                if event.output is not None:
                    found[event.request_id] = event.output
        engine.check()
        stats = [output.stats for output in found.values()]
        accepted = sum(s.accepted for s in stats) / max(1, sum(s.drafted for s in stats))
        return [list(found[i].token_ids) for i in sorted(found)], passes, accepted

    plain, _, _ = run(exact, "none")
    tokens, passes, accepted = run(cheap, "decode")
    assert tokens == plain
    assert sum(any(part.only_drafts for part in p.burst.drafts) for p in passes if p.burst is not None) > 5
    assert not any(p.only_drafts for p in run(cheap, "none")[1])
    assert 0.1 < accepted < most_accepted, "few bits are no copy of the weights"
    assert run(cheap, "none")[0] == plain
    # The control: weights of few bits for everything.
    monkeypatch.setattr(CudaBackend, "_drafts", lambda self, *_, **__: bool(self._models[0].draft_layers))
    assert run(CudaBackend([model], **sizes, draft_weights=kind), "none")[0] != plain


@of_the_stand_in
def test_a_draft_model_of_eight_bits_changes_no_output() -> None:
    """Its passes of few rows run on them, those of prompts do not; what it drafts is judged by the target."""
    config = TinyConfig(mlp_size=128, context_len=256)
    tensors = make_tensors(config)
    other = {name: values * np.float32(0.97) for name, values in tensors.items()}
    models = [CudaModel(config.architecture, source.__getitem__) for source in (tensors, other)]
    backend = CudaBackend(models, device=StandIn(), num_slots=conformance.NUM_SLOTS, num_seq_rows=8)
    found = []
    for method in ("none", "model"):
        sizes = EngineConfig(num_slots=conformance.NUM_SLOTS, max_running=8)
        drafters = make_drafters(cheap_setup(backend, draft_len=3))
        engine = Engine(backend, family=(1, 4, 16, 64, 256), drafters=drafters, config=sizes)
        for i in range(4):
            params = SamplingParams(max_tokens=20, seed=i, temperature=i % 2)
            prompt = conformance.PROMPT[5 * i :][:12]
            engine.add(Request(prompt, params, speculation=Speculation.of(method), is_streamed=False))
        outputs = []
        while engine.has_work:
            outputs += [event.output for event in engine.step() if event.output is not None]
        found.append(sorted(output.digest for output in outputs))
    assert found[0] == found[1]
    assert sum(output.stats.accepted for output in outputs) > 10
    by_eight_bits = {key.store: key.sizes.rows for key in backend._graphs._graphs if key.drafts}
    assert by_eight_bits.keys() == {1}
    assert any(key.store == 1 and not key.drafts and key.sizes.rows > 8 for key in backend._graphs._graphs)
