"""Captured rounds: one graph for each size of a pass and each way to draw, made when it is first needed."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from verispec.backends.cuda.arrange import PADDING
from verispec.backends.cuda.device import Device, Graph
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.steps import Kept, Parcel, Stage, StepSizes, StepState
from verispec.backends.protocol import View


class Draw(IntEnum):
    """What follows the logits."""

    NONE = 0
    PLAIN = 1
    FILTERED = 2


class GraphKey(NamedTuple):
    """What a graph is captured for; `single` of its rows are attended to one by one."""

    store: int
    view: View
    sizes: StepSizes
    single: int
    spans: int
    draw: Draw
    masked: bool = False
    starts: bool = False  # some rows from hidden states
    hidden: tuple[int, ...] = ()  # layers
    drafts: bool = False  # by weights of fewer bits
    stage: Stage = Stage.PASS
    edited: bool = False  # some rows change their logits before they draw
    children: int = 0  # that each row offers, in place of a draw
    looks_up: bool = False  # some chains that it verifies
    weighed: int = 0  # rows whose distributions are kept, because probabilities judge some drafts

    @property
    def verifies(self) -> bool:
        return self.stage in (Stage.FIRST, Stage.VERIFY)

    @property
    def may_be_left_out(self) -> bool:
        """Whether a condition should keep it from running where nobody has rows: steps of chains that have ended."""
        return self.stage is Stage.DRAFT and not (self.edited or self.weighed or self.children)

    @property
    def sends_rows(self) -> bool:
        """Whether the host names the rows; otherwise the device does."""
        return self.stage in (Stage.PASS, Stage.FIRST) and not self.sizes.is_round


class Graphs:
    """All captured rounds of a backend."""

    def __init__(self, device: Device, models: list[DeviceModel], state: StepState, max_drawn: int) -> None:
        self._device, self._models, self._state = device, models, state
        self._steps = device.steps()
        self.draws = device.draws(models[0].shapes.vocab, max_drawn)
        self._graphs: dict[GraphKey, Graph] = {}
        self._hidden: dict[GraphKey, dict[int, torch.Tensor]] = {}
        self._weighed: dict[int, Kept] = {}  # by how many rows

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: GraphKey) -> Graph:
        """The graph, captured if it is not there. That overwrites what was sent: send behind it."""
        found = self._graphs.get(key)
        if found is None:
            self._send_padding(key)
            if key.hidden:
                x = self._models[key.store].buffers.x
                self._hidden[key] = {i: torch.empty_like(x[: key.sizes.rows]) for i in key.hidden}
            if key.weighed and key.weighed not in self._weighed:
                vocab = self._models[0].shapes.vocab
                self._weighed[key.weighed] = Kept.of(key.weighed, vocab, self._state)
            found = self._graphs[key] = self._device.capture(lambda: self._round(key))
        return found

    def hidden(self, key: GraphKey) -> dict[int, torch.Tensor]:
        """Where a captured round leaves the residual stream before these layers. [rows, width]"""
        return self._hidden[key]

    def _send_padding(self, key: GraphKey) -> None:
        """What the run before a capture reads: rows of padding, or no members."""
        words = torch.zeros(self._state.max_words, dtype=torch.int32)  # the copy is waited for
        parcel = Parcel(words.numpy())
        if key.sends_rows:
            parcel.put("rows", np.repeat(PADDING[:, None], key.sizes.rows, axis=1))
        self._state.sent[: len(parcel)].copy_(words[: len(parcel)])

    def _round(self, key: GraphKey) -> None:
        model, state, sizes = self._models[key.store], self._state, key.sizes
        plan = Plan(
            rows=sizes.rows, forms=model.forms(sizes.rows, sizes.head_rows, drafts=key.drafts), single_rows=key.single,
            spans=key.spans, drafts=key.drafts,
            groups=state.groups[: sizes.num_groups] if sizes.num_groups else None, head_rows=sizes.head_rows or -1,
            view=key.view, starts=model.starts() if key.starts else None, hidden=self._hidden.get(key),
            busy=state.busy,
        )  # fmt: skip
        if key.looks_up:
            self._steps.look_up(state, sizes)
        self._steps.begin(state, sizes, key.stage)
        if key.may_be_left_out and not any(plan.forms):  # the library allocates, which such work must not
            self._device.only_if(state.busy, lambda: self._drawn(key, plan))
            logits, offered = model.logits, None
        else:
            logits, offered = self._drawn(key, plan)
        weighed = self._weighed.get(key.weighed)
        if offered is not None and key.stage is Stage.PASS:
            self._steps.end_children(state, sizes, offered, model.buffers.not_finite, store=key.store)
            return
        drawn, logprobs = self.draws.token_ids, self.draws.logprobs
        if weighed is not None and key.verifies:
            self._steps.weigh(state, sizes, weighed, logits, self.draws.totals, drawn, logprobs, stage=key.stage)
        not_finite = model.buffers.not_finite
        self._steps.end(
            state, sizes, drawn, logprobs, not_finite, store=key.store, stage=key.stage, offered=offered
        )  # fmt: skip

    def _drawn(self, key: GraphKey, plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pass and its draws: logits, and what rows offer in their place."""
        model, state, sizes, offered = self._models[key.store], self._state, key.sizes, None
        every_row = not key.sends_rows and sizes.rows == sizes.head_rows
        logits = model.forward(state.inputs, plan, None if every_row else state.row_ids[: sizes.head_rows])
        if key.draw:
            weighed = self._weighed.get(key.weighed)
            how = {
                "filters": key.draw is Draw.FILTERED, "allowed": state.allowed if key.masked else None,
                "edited": self._steps.edit(state, sizes, logits) if key.edited else None, "busy": state.busy,
            }  # fmt: skip
            kept = None if weighed is None else weighed.target if key.verifies else weighed.proposal
            if not key.children:
                self.draws.draw(logits, state.draws, sizes.head_rows, **how)
            if key.children or kept is not None:
                found = self.draws.children(logits, state.draws, sizes.head_rows, k=key.children, kept=kept, **how)
                offered = found if key.children else None
        return logits, offered
