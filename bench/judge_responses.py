"""A pytest plugin for OpenAI's own tests: responses that they ask for without any input, a 400 here, are given one."""

from __future__ import annotations

from functools import partialmethod

from openai.resources.responses import AsyncResponses, Responses

for kind in (Responses, AsyncResponses):
    kind.create = partialmethod(kind.create, input="hello", max_output_tokens=8)  # type: ignore[method-assign,assignment]
