"""Regular decoding as a drafter: N tokens in fast passes under dynamic batching, then one replay in canonical passes.

The engine decodes (its fast pass is where the rows of all sequences meet) and holds the tokens until they are verified;
this drafter says how many make a window and learns how often they are confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verispec.errors import InputError
from verispec.spec.drafter import Offer
from verispec.spec.plan import SequencePlan
from verispec.types import NO_DRAFT, Draft, SequenceView, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """N, and what is assumed of acceptance until it is seen: the prior counts as so many tokens."""

    window_len: int = 32
    prior_acceptance: float = 0.999
    prior_weight: float = 1000.0
    memory: float = 0.999

    def __post_init__(self) -> None:
        if self.window_len < 0:
            raise InputError(f"window_len must be at least 0, not {self.window_len}")


class DecodeDrafter:
    """Offers windows of regular decoding; the acceptance is one running rate over all sequences."""

    def __init__(self, config: DecodeConfig | None = None) -> None:
        self._config = config or DecodeConfig()
        self._tried = self._config.prior_weight
        self._accepted = self._tried * self._config.prior_acceptance

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """A window of regular decoding."""
        return Offer(min(limit, self._config.window_len), self._accepted / self._tried, by_decoding=True)

    def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
        """Nothing: the engine has what was decoded."""
        return [NO_DRAFT] * len(plans)

    def observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None:
        """Move the acceptance towards what this replay found."""
        tried = min(len(draft), len(verdict.path) + 1)  # tokens behind the first mismatch were never tried
        self._accepted = self._accepted * self._config.memory**tried + len(verdict.path)
        self._tried = self._tried * self._config.memory**tried + tried

    def forget(self, sequence_id: int) -> None:
        """Nothing kept."""
