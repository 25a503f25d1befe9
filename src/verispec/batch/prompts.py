"""Lines of `--prompts` files: JSON objects with a prompt and parameters, and the objects that answer them.

Keys that mean nothing here go through to the output; those that look like a misspelt parameter are refused. Errors of a
line name its fields, not the command line's flags.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from verispec.engine import Request
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM, Completion
from verispec.receipt.values import check_recordable
from verispec.strict_json import load_object
from verispec.text.prompts import CONTENT_KEYS, PARAMETERS, PromptSpec, spec
from verispec.types import SampleOutput, SamplingParams, TokenLogprobs

# What an object of `as_object` may hold, and `index` and `error` of a line.
OBJECT_KEYS = frozenset(
    ("index", "error", "text", "token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "finish_reason", "seed",
     "digest", "stats", "prompt_tokens", "profile", "samples")
)  # fmt: skip
_COUNTERS = (
    "cached_tokens", "passes", "fast_passes", "draft_passes", "drafted", "accepted", "replays", "mismatches",
    "recomputed", "preemptions", "time_to_first_token", "longest_gap", "longest_stall", "stall_caused",
    "exit_threshold", "exit_rate",
)  # fmt: skip
_KNOWN = (*CONTENT_KEYS, *PARAMETERS, "prediction")
_LIKENESS = 0.8  # of a key to one that is known, from which on it is taken for a slip


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of the file: a request, or why there is none; and what goes through to the output."""

    request: Request | None = None
    error: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LineReader:
    """Turns lines into requests. `defaults` hold where a line says nothing; without a seed, line i has seed i."""

    llm: LLM
    defaults: SamplingParams
    drafter: str
    raw: bool = False
    system: str | None = None
    recorded: bool = False

    def parse(self, index: int, line: bytes) -> PromptLine:
        extra: dict[str, Any] = {}
        try:
            data = load_object(line, name="the line", example='{"prompt": "..."}')
            extra = {key: data.pop(key) for key in list(data) if key not in _KNOWN}
            _check_extra(extra)
            if data.get("seed") is None:
                data["seed"] = index if self.defaults.seed is None else self.defaults.seed
            asked = spec(data, self.defaults, name="the line")
            if self.recorded:
                check_recordable(asked.params)
            prompt = {**self._prompt(asked), "prediction": asked.prediction}
            return PromptLine(self.llm.request(prompt, asked.params, drafter=self.drafter), extra=extra)
        except VerispecError as error:
            return PromptLine(error=str(error), extra={key: extra[key] for key in extra if key not in OBJECT_KEYS})

    def _prompt(self, asked: PromptSpec) -> dict[str, str | list[int]]:
        """Text or ids as the model gets them; a line's own system message replaces the command's."""
        content, messages = asked.content, asked.messages
        if isinstance(content, list):
            return {"token_ids": content}
        if content is not None:
            if not content.strip():
                raise InputError("prompt must be text that is not empty")
            if self.raw:
                return {"prompt": content}
            messages = [{"role": "user", "content": content}]
        if self.raw:
            raise InputError("messages need the chat template, which --raw turns off")
        if self.system is not None and _lacks_system(messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return {"token_ids": self.llm.chat_ids(messages)}


def _lacks_system(messages: Any) -> bool:
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and first.get("role") != "system"


def _check_extra(extra: Mapping[str, Any]) -> None:
    for key in extra:
        plain = key.lower().replace("-", "_")
        meant = get_close_matches(plain, _KNOWN, n=1, cutoff=_LIKENESS)
        if meant:
            raise InputError(f"unknown key {key!r}; did you mean {meant[0]}?")
        if key in OBJECT_KEYS:
            raise InputError(f"the key {key!r} is one of the output's own; it cannot go through under that name")


def numbers(output: SampleOutput) -> dict[str, Any]:
    stats, num_tokens = output.stats, len(output.token_ids)
    computed = output.prompt_len - stats.cached_tokens
    return {
        "prompt_tokens_per_second": _rate(computed, stats.arrival_time, stats.first_token_time),
        "tokens_per_second": _rate(num_tokens - 1, stats.first_token_time, stats.finish_time),
        **{name: getattr(stats, name) for name in _COUNTERS},
        "recomputed_fraction": stats.recomputed / max(1, stats.recomputed + num_tokens),
        "accepted_per_replay": stats.accepted / stats.replays if stats.replays else None,
        "tokens_per_pass": output.tokens_per_pass,
        "chosen": dict(stats.chosen),
        "accepted_by": dict(stats.accepted_by),
        "chosen_because": stats.chosen_because or None,
        "no_draft_reason": stats.no_draft_reason if not stats.drafted else None,
    }


def _rate(count: int, start: float | None, end: float | None) -> float | None:
    """Tokens per second; None where there was nothing to time."""
    return None if count < 1 or start is None or end is None or end <= start else count / (end - start)


def as_object(completion: Completion, *, drafter: str, stats: bool) -> dict[str, Any]:
    """The completion as one JSON object; with several samples, the others are under `samples`.

    Without `stats` it is a function of the request alone: no times, no counts that depend on what else ran.
    """
    first, *others = (_sample_object(sample, drafter, stats=stats) for sample in completion.samples)
    result = {**first, "prompt_tokens": len(completion.prompt_ids), "profile": completion.profile}
    if others:
        result["samples"] = [first, *others]
    return result


def _sample_object(sample: SampleOutput, drafter: str, *, stats: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "logprobs": [entry.logprob for entry in sample.logprobs],
        "finish_reason": str(sample.finish_reason),
        "seed": sample.seed,
        "digest": sample.digest,
    }
    if stats:
        result["stats"] = {"drafter": drafter, **numbers(sample)}
    if any(entry.alternatives for entry in sample.logprobs):
        result["top_logprobs"] = _alternatives(sample.logprobs)
    if sample.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entry.logprob for entry in sample.prompt_logprobs]
    if sample.error is not None:
        result["error"] = sample.error
    return result


def _alternatives(entries: TokenLogprobs) -> list[list[list[float]]]:
    return [[[token_id, value] for token_id, value in entry.alternatives] for entry in entries]
