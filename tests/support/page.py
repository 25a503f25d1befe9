"""The server's page in a real browser, driven as a user would; and streams that are made up, to be shown on it."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ANSWERS = "**/v1/chat/completions"


@dataclass
class Talk:
    """A page, and what went wrong on it: errors in its console, and requests that went elsewhere."""

    page: Any
    url: str
    problems: list[str] = field(default_factory=list)

    @property
    def last(self) -> Any:
        """The newest answer."""
        return self.page.locator(".turn.assistant").last

    def set(self, **settings: object) -> None:
        """Fill in settings, which stay open."""
        if not self.page.locator("#system").is_visible():
            self.page.locator("aside summary", has_text="Settings").click()
        for name, value in settings.items():
            box = self.page.locator(f"#{name}")
            if name in ("drafter", "tool_choice"):
                box.select_option(str(value))
            else:
                box.fill(str(value))
                box.blur()

    def ask(self, text: str) -> Any:
        """Send a message and wait for the answer's end."""
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")
        return self.ended()

    def ended(self) -> Any:
        """The newest answer, once it has ended with a digest."""
        self.page.locator("#send").wait_for()
        self.last.locator(".proof").wait_for()
        return self.last

    def press(self, name: str) -> None:
        """A button of the newest answer."""
        self.last.get_by_role("button", name=name, exact=True).click()


@contextmanager
def talking(browser: Any, url: str, *, width: int = 1200, **options: Any) -> Iterator[Talk]:
    """The page, connected; at the end nothing may have gone wrong on it."""
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    talk = Talk(context.new_page(), url)
    page, problems = talk.page, talk.problems
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "blob:")) else problems.append(request.url))
    page.goto(url)
    page.locator("#state", has_text="fingerprint vs-").wait_for()
    yield talk
    assert problems == []
    context.close()


class Pass(NamedTuple):
    """A pass that never was: its tokens, the draft that they are from as (drafter, tokens, parents, path), its time."""

    pieces: Sequence[str]
    draft: tuple[str, Sequence[str], Sequence[int], Sequence[int]] | None = None
    ms: int = 10


def made_up_stream(passes: Sequence[Pass], *, digest: str | None = None) -> bytes:
    """The frames of an answer with these passes, as the server would send them. Token ids are counted."""
    head = {"id": "x", "object": "chat.completion.chunk", "system_fingerprint": "vs-0"}
    frames: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant"}}], "verispec": {"seed": 3, "profile": "p"}}
    ]
    ids: list[int] = []
    logprobs: list[float] = []
    ms = 0
    for told in passes:
        ms += told.ms
        new_ids = list(range(len(ids), len(ids) + len(told.pieces)))
        ids += new_ids
        logprobs += [-0.1 * (token_id + 1) for token_id in new_ids]
        entries = [_entry(piece, logprobs[token_id]) for piece, token_id in zip(told.pieces, new_ids, strict=True)]
        choice = {"index": 0, "delta": {"content": "".join(told.pieces)}, "logprobs": {"content": entries}}
        own: dict[str, Any] = {"pieces": list(told.pieces), "accepted": 0, "ms": ms}
        if told.draft is not None:
            drafter, tokens, parents, path = told.draft
            own["accepted"] = len(path)
            own["draft"] = {"drafter": drafter, "tokens": tokens, "parents": parents, "path": path}
            own["draft"]["draft_probabilities"] = [0.75] * len(tokens)
            own["draft"]["target_probabilities"] = [0.5] * len(tokens)
        frames.append({**head, "choices": [{**choice, "token_ids": new_ids, "finish_reason": None}], "verispec": own})
    frames[-1]["choices"][0]["finish_reason"] = "stop"
    packed = struct.pack(f"<{len(ids)}i{len(ids)}f", *ids, *logprobs)
    frames[-1]["verispec"] |= {"digest": digest or hashlib.sha256(packed).hexdigest(), "tokens_per_pass": 2.0}
    frames.append({**head, "choices": [], "metrics": {"tokens_per_second": 10.0}})
    return b"".join(f"data: {json.dumps(frame)}\n\n".encode() for frame in frames) + b"data: [DONE]\n\n"


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "top_logprobs": [{"token": "else", "logprob": logprob - 1}]}
