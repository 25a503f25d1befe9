"""The two ends of a round on the device: what the host sends for a pass, where it is unpacked, and what comes back.

One copy brings everything a pass needs: bindings, table entries, rows, draws and who goes on. The rest a round reads
from records of the sequences, so that further rounds need no host.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.cuda.arguments import current_stream, filled, pointers, struct
from verispec.backends.cuda.compiler import NOT_KEPT, Cubins, Kernel, Modules
from verispec.backends.cuda.drawing import MASS_CHUNK, DrawInputs, Shares
from verispec.backends.cuda.kernels import RowInputs
from verispec.backends.protocol import BackendLimits
from verispec.kv import DUMP_SLOT, NUM_RESERVED, TARGET_STORE
from verispec.sampling.rows import Sampler, log_or_off

Int32 = NDArray[np.int32]
MAX_ROUNDS = 255  # of one pass, behind its first
MAX_UPDATES = 1 << 16  # table entries that travel with a pass
MAX_STOPS = 16  # stop ids of a sequence that the device can look for
HEADER = (
    "round", "binds", "binds_at", "updates", "updates_at", "rows_at", "tail_width", "tails_at", "groups", "groups_at",
    "draws", "draws_at", "fed", "fed_at", "members", "members_at", "out_width", "chains", "chains_at", "owners",
    "owners_at", "passes", "passes_at", "drafters_at", "pass", "extra_at",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(HEADER)}
RECORD = (
    "seed_low", "seed_high", "sample", "temperature", "top_k", "top_p", "log_min_p", "limit", "next", "length",
    "min_len", "prompt_len", "edits", "penalises", "counts_prompt", "repetition", "presence", "presence_high",
    "frequency", "frequency_high", "num_bias", "num_stops",
)  # fmt: skip
RECORD_WORDS = 64
MAX_BIAS = (RECORD_WORDS - len(RECORD) - MAX_STOPS) // 2  # ids with a bias that a record has room for
MAX_OFFERED = 1 << 16  # children that one pass may offer to beams
MAX_EDITED_ROWS = 64  # rows of one pass whose logits the device can change
NEXT, LENGTH = RECORD.index("next"), RECORD.index("length")
_ROWS = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens", "ready_lens", "tails")
_DRAWS = ("seeds", "counters", "temperature", "top_k", "top_p", "log_min_p", "masks")
_StepArgs = struct(
    "StepArgs",
    *pointers("sent", "records", "table", "slot_tokens", *_ROWS, "groups", "row_ids", *_DRAWS),
    *pointers("drawn", "logprobs", "not_finite", "broken", "num_broken", "broken_rows", "out", "busy"),
    ("table_width", ctypes.c_longlong),
    *((name, ctypes.c_int) for name in ("tail_width", "rows", "num_groups", "head_rows", "is_round")),
)


_CHAINS = ("drafts", "parents", "grows", "phi", "log_tau", "race", "counts", "live", "most", "share_rows")
_ChainArgs = struct("ChainArgs", ("step", _StepArgs), *pointers(*_CHAINS, "offered"))
_WeighArgs = struct(
    "WeighArgs", ("chains", _ChainArgs), *pointers("target", "proposal", "target_sums", "proposal_sums", "left_sums"),
    *pointers("logits", "totals", "drawn", "logprobs"), ("vocab", ctypes.c_int), ("chunks", ctypes.c_int),
)  # fmt: skip
_WEIGH_THREADS = 512  # as weighing.cu has it
MAX_WEIGHED_VOCAB = MASS_CHUNK * 1024  # that its trees have leaves for
_ChildrenArgs = struct("ChildrenArgs", ("step", _StepArgs), *pointers("offered"), ("k", ctypes.c_int))
_EditArgs = struct("EditArgs", ("step", _StepArgs), *pointers("edited", "counts"), ("vocab", ctypes.c_int))


class Stage(Enum):
    """What a captured pass is of a burst: the kernels before it, and those behind it."""

    PASS = ("begin_round",), ("end_round",)
    FIRST = ("begin_round", "place_drafts"), ("end_round", "judge_first")  # verifies drafts beside other rows
    DRAFT = ("begin_draft",), ("end_draft",)
    ROOT = ("begin_draft",), ("end_level",)  # the first level of trees
    LEVEL = ("begin_level",), ("end_level",)
    VERIFY = ("begin_verify",), ("end_verify",)


class StepSizes(NamedTuple):
    """What one captured round has; `is_round`: one row for each member, wherever its record says it is."""

    rows: int
    head_rows: int
    num_groups: int = 0
    is_round: bool = False


class StepState:
    """The static tensors of a backend: what is sent, what is kept of sequences, the inputs of a pass, the results."""

    def __init__(self, limits: BackendLimits, max_rows: int, device: str) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        count, rows = limits.num_seq_rows + 1, max_rows
        self.max_words = len(HEADER) + count * (RECORD_WORDS + 15) + rows * (21 + limits.max_tail) + 3 * MAX_UPDATES
        self.sent = zeros(self.max_words)
        self.records = zeros(count, RECORD_WORDS)
        self.slot_tokens = zeros(limits.num_slots + NUM_RESERVED)
        self.broken = zeros(limits.num_stores, limits.num_slots + NUM_RESERVED)  # slots of each model
        self.num_broken, self.broken_rows = zeros(1), zeros(rows)
        self.groups = zeros(rows, 2)
        self.row_ids = zeros(rows)
        self.busy = zeros(1)  # 0 while the pass has no row but padding
        self.allowed = zeros(limits.num_masks, -(-limits.vocab_size // 32))  # the mask table
        self.out = zeros((MAX_ROUNDS + 1) * 2 * rows)
        sizes = dict.fromkeys(_CHAINS, rows) | {"race": MAX_OFFERED}
        reals = {"phi", "log_tau", "race"}
        self.chains = {n: zeros(sizes[n], dtype=torch.float64 if n in reals else torch.int32) for n in _CHAINS}
        names = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens", "ready_lens")
        table = zeros(count, limits.context_len)
        table[0] = DUMP_SLOT  # the context of padding
        self.inputs = RowInputs(**{n: zeros(rows) for n in names}, tails=zeros(rows, limits.max_tail), table=table)
        self.draws = DrawInputs(
            seeds=zeros(rows, 2), counters=zeros(rows, 3), top_k=zeros(rows), masks=zeros(rows),
            **{n: zeros(rows, dtype=torch.float32) for n in ("temperature", "top_p", "log_min_p")},
        )  # fmt: skip


class Kept(NamedTuple):
    """What rounds that probabilities judge keep on the device until they are judged: distributions by the rows that
    verify, and room for the sums of what rejections leave."""

    target: Shares
    proposal: Shares
    left_sums: torch.Tensor  # [members, 3, V / MASS_CHUNK] float64

    @classmethod
    def of(cls, num_rows: int, vocab: int, state: StepState) -> Kept:
        """Allocate it: there are no more members than rows."""
        target, proposal = (Shares.of(num_rows, vocab, state.chains["share_rows"]) for _ in range(2))
        return cls(target, proposal, torch.stack([target.masses] * 3, dim=1))


class StepKernels:
    """`begin` and `end` of a round, and `edit` before its draw, put on the current stream."""

    def __init__(self, cubins: Cubins = NOT_KEPT) -> None:
        self._modules, self._kernels = Modules(cubins), dict[str, Kernel]()
        self._counts: dict[tuple[int, ...], torch.Tensor] = {}  # of tokens, zero between draws

    def begin(self, state: StepState, sizes: StepSizes, stage: Stage = Stage.PASS) -> None:
        """The inputs of the next pass."""
        self._run(stage.value[0], state, _arguments(state, sizes))

    def end(
        self, state: StepState, sizes: StepSizes, drawn: torch.Tensor, logprobs: torch.Tensor, not_finite: torch.Tensor,
        *, store: int = TARGET_STORE, stage: Stage = Stage.PASS, offered: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Results of the round, and where it leaves its sequences; `offered` are children [3, R, k]."""
        broken = state.broken[store]
        args = filled(_arguments(state, sizes), drawn=drawn, logprobs=logprobs, not_finite=not_finite, broken=broken)
        self._run(stage.value[1], state, args, offered)

    def end_children(
        self, state: StepState, sizes: StepSizes, offered: torch.Tensor, not_finite: torch.Tensor, *, store: int
    ) -> None:
        """Results of a pass whose rows offer children, [3, R, k]."""
        step = filled(_arguments(state, sizes), not_finite=not_finite, broken=state.broken[store])
        args = filled(_ChildrenArgs(step=step, k=offered.shape[2]), offered=offered)
        self.launch("steps.cu", "end_children", args)

    def look_up(self, state: StepState, sizes: StepSizes) -> None:
        """The chains that are looked up, before the pass that verifies them."""
        args = filled(_ChainArgs(step=_arguments(state, sizes)), **state.chains)
        self.launch("chains.cu", "begin_look_up", args)
        self.launch("chains.cu", "look_up", args, blocks=sizes.head_rows)

    def weigh(
        self, state: StepState, sizes: StepSizes, weighed: Kept, logits: torch.Tensor, totals: torch.Tensor,
        drawn: torch.Tensor, logprobs: torch.Tensor, *, stage: Stage,
    ) -> None:  # fmt: skip
        """Let probabilities judge what they should: what they commit takes the place of draws and log-probabilities."""
        target, proposal = weighed.target, weighed.proposal
        chains = filled(_ChainArgs(step=_arguments(state, sizes)), **state.chains)
        args = filled(
            _WeighArgs(chains=chains), target=target.values, proposal=proposal.values, target_sums=target.masses,
            proposal_sums=proposal.masses, left_sums=weighed.left_sums, logits=logits, totals=totals, drawn=drawn,
            logprobs=logprobs, vocab=target.values.shape[1], chunks=target.masses.shape[1],
        )  # fmt: skip
        name = "weigh_first" if stage is Stage.FIRST else "weigh_further"
        self.launch("weighing.cu", name, args, blocks=min(sizes.head_rows, len(target.values)), threads=_WEIGH_THREADS)

    def edit(self, state: StepState, sizes: StepSizes, logits: torch.Tensor) -> torch.Tensor:
        """A copy of the logits [R, V] with penalties, bias and bans of the rows that draw."""
        if logits.shape not in self._counts:
            self._counts[logits.shape] = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        edited = logits.clone()
        args = _EditArgs(step=_arguments(state, sizes), vocab=logits.shape[1])
        filled(args, edited=edited, counts=self._counts[logits.shape])
        self.launch("edits.cu", "edit_rows", args, blocks=len(logits), threads=256)
        return edited

    def _run(
        self, names: tuple[str, ...], state: StepState, args: ctypes.Structure, offered: torch.Tensor | None = None
    ) -> None:
        for name in names:
            if name.endswith("_round"):
                self.launch("steps.cu", name, args)
            else:
                source = "trees.cu" if name.endswith("_level") else "chains.cu"
                self.launch(source, name, filled(_ChainArgs(step=args), **state.chains, offered=offered))

    def launch(self, source: str, name: str, args: ctypes.Structure, *, blocks: int = 1, threads: int = 1024) -> None:
        """On the current stream."""
        if name not in self._kernels:
            self._kernels[name] = self._modules.kernel(source, name, {})
        self._kernels[name].launch((blocks, 1, 1), threads, args, stream=current_stream())


def _arguments(state: StepState, sizes: StepSizes) -> ctypes.Structure:
    inputs, draws = state.inputs, state.draws
    return filled(
        _StepArgs(), sent=state.sent, records=state.records, table=inputs.table, slot_tokens=state.slot_tokens,
        num_broken=state.num_broken, broken_rows=state.broken_rows, groups=state.groups, row_ids=state.row_ids,
        out=state.out, busy=state.busy, table_width=inputs.table.shape[1],
        tail_width=inputs.tails.shape[1], **sizes._asdict(),
        **{name: getattr(inputs, name) for name in _ROWS}, **{name: getattr(draws, name) for name in _DRAWS},
    )  # fmt: skip


def record_of(sampler: Sampler, limits: BackendLimits) -> Int32:
    """A sequence as the device knows it: nothing of the row's last owner stays."""
    params, words = sampler.params, np.zeros(RECORD_WORDS, np.int32)
    stops = [i for i in sampler.stop_ids if 0 <= i < limits.vocab_size][:MAX_STOPS]
    bias = [pair for pair in dict(params.logit_bias).items() if pair[0] < limits.vocab_size][:MAX_BIAS]
    floats = np.array([params.temperature, params.top_p, params.min_p, params.repetition_penalty], np.float32)
    floats[2:3] = log_or_off(floats[2:3])
    temperature, top_p, log_min_p, repetition = floats.view(np.int32).tolist()
    doubles = np.array([params.presence_penalty, params.frequency_penalty]).view(np.int32).tolist()  # low words first
    seed = np.array([sampler.key.seed], np.uint64).view(np.int32).tolist()
    top_k, limit = min(params.top_k, limits.vocab_size), min(sampler.limit, limits.context_len)
    has_edits = params.has_penalties or bool(bias) or params.min_tokens > 0
    values = (
        *seed, sampler.key.sample_index, temperature, top_k, top_p, log_min_p, limit, -1, 0,
        sampler.prompt_len + params.min_tokens, sampler.prompt_len, has_edits, params.has_penalties,
        params.repetition_penalty != 1, repetition, *doubles, len(bias), len(stops), *stops,
    )  # fmt: skip
    words[: len(values)] = values
    pairs = words[len(RECORD) + MAX_STOPS :][: 2 * len(bias)].reshape(-1, 2)
    pairs[:, 0] = [i for i, _ in bias]
    pairs[:, 1] = np.array([value for _, value in bias], np.float32).view(np.int32)
    return words


class Parcel:
    """What is sent for a pass, written into a host buffer part by part."""

    def __init__(self, words: Int32) -> None:
        self._words = words
        self._end = len(HEADER)
        words[: self._end] = 0

    def __len__(self) -> int:
        return self._end

    def set(self, name: str, value: int) -> None:
        """A number of the header."""
        self._words[_AT[name]] = value

    def put(self, name: str, *columns: NDArray[np.signedinteger[Any]]) -> None:
        """Columns of one length, one behind the other, and where they begin."""
        self._words[_AT[f"{name}_at"]] = self._end
        for column in columns:
            end = self._end + column.size
            self._words[self._end : end] = column.reshape(-1)
            self._end = end
