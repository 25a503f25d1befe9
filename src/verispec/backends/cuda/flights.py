"""Passes under way: host memory for what is sent and for what comes back, and the ticket that waits for it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.cuda.chains import Chains
from verispec.backends.cuda.device import Device
from verispec.backends.cuda.outputs import noisy_top_k
from verispec.backends.cuda.steps import StepState
from verispec.backends.gpu import Health
from verispec.backends.protocol import BurstResult, DistributionHandle, PassResult
from verispec.sampling.draw import DrawResult

Int32 = NDArray[np.int32]
_FIRST_WORDS = 1 << 12


class Lane:
    """Host memory of one pass: it is free again when the pass has been read."""

    def __init__(self, device: Device, state: StepState) -> None:
        self.sent_words = device.host_words(state.max_words)
        self.sent: Int32 = self.sent_words.numpy()
        self._device = device
        self._back_words = device.host_words(_FIRST_WORDS)
        self._event = device.event()

    def fetch(self, out: torch.Tensor, count: int) -> None:
        """Start the copy back."""
        if count > len(self._back_words):
            self._back_words = self._device.host_words(1 << (count - 1).bit_length())
        self._back_words[:count].copy_(out[:count], non_blocking=True)
        self._event.record()

    def settle(self) -> None:
        """Wait until the device has no use for it."""
        self._event.record()
        self._event.synchronize()

    def wait(self) -> Int32:
        """What came back, once it has."""
        self._event.synchronize()
        words: Int32 = self._back_words.numpy()
        return words


class Expected(NamedTuple):
    """What comes back: `num_rounds` records of tokens and log-probabilities, `width` each. None: not wanted."""

    num_rounds: int
    width: int
    num_drawn: int | None
    num_fed: int | None
    chains: Chains | None = None  # whose part begins behind the tokens, at `extra_at`
    extra_at: int = 0
    children: int = 0  # of each row, in the place of tokens
    distribution: DistributionHandle | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the words."""
        if self.children:
            return 3, self.num_drawn or 0, self.children
        return self.num_rounds, 2, self.width


class CudaTicket:
    """A pass on the device."""

    def __init__(self, lane: Lane, lanes: list[Lane], expected: Expected, health: Health) -> None:
        self._lane: Lane | None = lane
        self._lanes, self._expected, self._health = lanes, expected, health
        self._result = PassResult()

    def result(self) -> PassResult:
        """Wait for the device, once; the lane goes back to the others."""
        if self._lane is not None:
            lane, expected = self._lane, self._expected
            with self._health.guarded():
                words = lane.wait()[: math.prod(expected.shape)].reshape(expected.shape)
            self._lane = None
            draw = noisy = burst = None
            if expected.children:
                noisy = noisy_top_k(words.copy())
            elif expected.num_drawn is not None:
                tokens, logprobs = words[0, :, : expected.num_drawn]
                draw = DrawResult(tokens.astype(np.int64), logprobs.view(np.float32).copy())
            if expected.chains is not None:
                burst = expected.chains.result(words, expected.extra_at)
            elif expected.num_fed is not None:
                tokens, logprobs = words[1:, :, : expected.num_fed].transpose(1, 2, 0)  # [S, rounds] each
                accepted = np.where(words[:, 0, : expected.num_fed].T >= 0, 0, -1).astype(np.int32)
                accepted[:, 0] = 0  # nothing is drafted: each round gives its one token, or none
                nothing = np.zeros((*accepted.shape, 0), np.int64)
                values = np.ascontiguousarray(logprobs).view(np.float32)
                burst = BurstResult(tokens.astype(np.int64), values, nothing, accepted)
            self._result = PassResult(
                draw=draw, burst=burst, noisy_top_k=noisy, distribution=expected.distribution
            )  # fmt: skip
            self._lanes.append(lane)
        return self._result
