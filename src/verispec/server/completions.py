"""/v1/completions: text or tokens, continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from verispec.errors import InputError
from verispec.server.answer import Answer
from verispec.server.api import MAX_PROMPTS, CompletionRequest
from verispec.server.call import sampling_params
from verispec.server.choices import Choice, Commit
from verispec.server.core import Core
from verispec.server.http import Received, Reply
from verispec.server.logprobs import Offsets, completion_entries, prompt_entries
from verispec.server.openai import Shape, make_call, reply
from verispec.text.detokenizer import TextStream, answer_text
from verispec.types import TokenLogprob

DEFAULT_MAX_TOKENS = 16


async def completions(core: Core, received: Received) -> Reply:
    """Continue one prompt or several."""
    body = received.parsed(CompletionRequest)
    model = core.check_model(body.model)
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise InputError("best_of above n is not supported")
    if body.echo and body.stream:
        raise InputError("echo cannot be streamed")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    if body.echo and body.max_tokens == 0:
        prompt_logprobs = prompt_logprobs or 0  # the engine scores a prompt instead of generating nothing
    params = sampling_params(
        body,
        body.verispec,
        core.llm.generation_defaults,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    call = await make_call(
        core, body, received, prompts=await _prompts(core, body), params=params, stream=body.stream,
        extension=body.verispec,
    )  # fmt: skip
    return await reply(core.start(call), body, _shape(body), model)


async def _prompts(core: Core, body: CompletionRequest) -> list[list[int]]:
    """The tokens of every prompt. A flat list of numbers is one prompt."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InputError(f"prompt may hold at most {MAX_PROMPTS} prompts, not {len(prompt)}")
    if len({str if isinstance(each, str) else list for each in prompt}) > 1 or any(
        isinstance(each, int) or (isinstance(each, list) and not all(isinstance(i, int) for i in each))
        for each in prompt
    ):
        raise InputError("prompt must be text, token ids, a list of texts or a list of lists of token ids")
    encode = partial(core.llm.tokenizer.encode, add_special=body.add_special_tokens is not False)
    return [
        await core.tokenised(partial(encode, each), len(each)) if isinstance(each, str) else each for each in prompt
    ]


class _FrameOffsets:
    """Where the tokens of frames begin in the text of their choice, behind those that the client has already."""

    def __init__(self) -> None:
        self._begun: dict[int, Offsets] = {}  # by choice

    def of(self, answer: Answer, commit: Commit) -> list[int]:
        """Those of a frame's tokens. Frames come in order."""
        index = commit.choice
        if index not in self._begun:
            self._begun[index] = _offsets(answer, index)
            known_ids = [*answer.given_ids(index), *answer.choices[index].entries.token_ids]
            self._begun[index].of(known_ids[: commit.end - len(commit.logprobs)])
        return self._begun[index].of(commit.logprobs.token_ids)


def _offsets(answer: Answer, index: int) -> Offsets:
    """Of a choice's tokens in its text, as if nothing stopped it."""
    params = replace(answer.call.params, stop=())
    return Offsets(answer_text(answer.core.llm.tokenizer, _prompt_ids(answer, index), params))


def _prompt_ids(answer: Answer, index: int) -> Sequence[int]:
    return answer.call.prompts[index // answer.call.params.n]


def _shape(body: CompletionRequest) -> Shape:
    wants_ids, offsets = bool(body.return_token_ids), _FrameOffsets()

    def whole(answer: Answer, index: int, choice: Choice) -> dict[str, Any]:
        tokenizer = answer.core.llm.tokenizer
        prompt_ids = _prompt_ids(answer, index)
        text, known_ids = choice.text, answer.given_ids(index)
        ids: Sequence[int] = choice.entries.token_ids
        entries: list[TokenLogprob | None] = [*choice.entries]
        starts = _offsets(answer, index).of([*known_ids, *ids])[len(known_ids) :]
        if body.echo:
            prompt = tokenizer.decode(prompt_ids)
            text = prompt + text
            if choice.output is not None:
                starts = [*Offsets(TextStream(tokenizer)).of(prompt_ids), *(len(prompt) + start for start in starts)]
                ids = [*prompt_ids, *ids]
                entries = [None, *(choice.output.prompt_logprobs or ()), *entries]
        found: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if body.logprobs is None else completion_entries(tokenizer, entries, ids, starts),
            "finish_reason": None if choice.output is None else str(choice.output.finish_reason),
        }
        if wants_ids:
            found["token_ids"] = choice.entries.token_ids
            found["prompt_token_ids"] = list(prompt_ids)
        if body.prompt_logprobs is not None and choice.output is not None:
            found["prompt_logprobs"] = prompt_entries(tokenizer, choice.output.prompt_logprobs)
        return found

    def frame(answer: Answer, commit: Commit) -> dict[str, Any]:
        reason, listed = commit.event.finish_reason, None
        if body.logprobs is not None:
            tokenizer, entries = answer.core.llm.tokenizer, commit.logprobs
            listed = completion_entries(tokenizer, entries, entries.token_ids, offsets.of(answer, commit))
        found: dict[str, Any] = {
            "index": commit.choice,
            "text": commit.text,
            "logprobs": listed,
            "finish_reason": None if reason is None else str(reason),
        }
        if wants_ids:
            found["token_ids"] = commit.logprobs.token_ids
        return found

    return Shape(
        kind="text_completion",
        id_prefix="cmpl-",
        whole=whole,
        frame=frame,
        opening={"text": ""},
        plain=(b',"text":', b',"logprobs":null,"finish_reason":null}]}'),
        has_details=wants_ids or body.logprobs is not None,
    )
