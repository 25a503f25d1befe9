"""Chat messages to prompt text, through the model's own Jinja template. `chat_prompt` makes tokens of it.

Knows what a message is and what templates expect to find (the names that `transformers` gives them), and caps what goes
in and what comes out; `chat_sandbox` bounds the work in between. Templates see no clock: `strftime_now` exists only
where the caller passes `today`, so that a prompt depends on nothing but its arguments; templates that ask whether it is
defined, as Llama's do, then use the date written in them. Knows nothing of tokens.
"""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError

from verispec.errors import InputError, ModelFileError
from verispec.text.chat_sandbox import BoundedEnvironment, Budget
from verispec.text.content_mask import ContentMask

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_TEMPLATE_CHARS = 128 * 1024
MAX_PROMPT_CHARS = 16 * 1024 * 1024  # also the cap on everything that goes in
# What a rendering may make beside its output, and for how long it may work: ordinary ones take about a millisecond.
BASE_CHARS = 2 * MAX_PROMPT_CHARS
CHARS_PER_INPUT_CHAR = 16
MAX_SECONDS = 1.0
_MAX_BRIEF_CHARS = 200
_VARIABLES = ("messages", "tools", "add_generation_prompt")

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_DATE_FORMATS: dict[str, Callable[[datetime.date], str]] = {
    "%%": lambda date: "%",
    "%Y": lambda date: f"{date.year:04}",
    "%y": lambda date: f"{date.year % 100:02}",
    "%m": lambda date: f"{date.month:02}",
    "%d": lambda date: f"{date.day:02}",
    "%e": lambda date: f"{date.day:2}",
    "%-d": lambda date: f"{date.day}",
    "%B": lambda date: _MONTHS[date.month - 1],
    "%b": lambda date: _MONTHS[date.month - 1][:3],
    "%A": lambda date: _DAYS[date.weekday()],
    "%a": lambda date: _DAYS[date.weekday()][:3],
}


class ChatTemplate:
    """A compiled template. Rendering is deterministic and bounded; one rendering at a time."""

    def __init__(self, template: str | None, *, today: datetime.date | None = None) -> None:
        if not template:
            raise InputError("the model has no chat template; give a plain prompt instead (--raw on the command line)")
        if len(template) > MAX_TEMPLATE_CHARS:
            raise ModelFileError(f"the chat template has {len(template)} characters; the limit is {MAX_TEMPLATE_CHARS}")
        functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception}
        if today is not None:
            functions["strftime_now"] = lambda pattern: _format_date(today, pattern)
        self._environment = BoundedEnvironment(Budget(BASE_CHARS, MAX_SECONDS), functions)
        try:
            code = self._environment.compile_bounded(template)
        except TemplateSyntaxError as error:
            raise ModelFileError(f"the chat template, line {error.lineno}: {_one_line(error.message or '')}") from error
        except Exception as error:  # a template is a program we did not write: too deeply nested, for one
            raise ModelFileError(f"the chat template cannot be compiled: {_brief(error)}") from error
        self._template = Template.from_code(self._environment, code, self._environment.globals)
        self._source = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        mask: ContentMask | None = None,
    ) -> str:
        """The prompt for `messages`; raises `InputError` where they are malformed or the template refuses them.

        `variables` are further names that the template may look at (`enable_thinking`, say), never those it has anyway.
        With a `mask` the text still wears it: control tokens in it are the template's own.
        """
        conversation = _checked(messages)
        declared = None if tools is None else [dict(tool) for tool in tools]
        further = self._further(variables or {}, special_tokens)
        num_chars = _input_chars(conversation, declared, further)
        if mask is not None:
            conversation, declared, further = mask.apply(conversation, declared, further, template=self._source)
        self._environment.budget = Budget(BASE_CHARS + CHARS_PER_INPUT_CHAR * num_chars, MAX_SECONDS)
        known = {
            **further,
            **special_tokens,
            "messages": conversation,
            "tools": declared,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._collect(known)
        except TemplateError as error:
            raise InputError(f"the chat template refused the messages: {_brief(error)}") from error
        except InputError:
            raise
        except Exception as error:  # a template is a program we did not write and may fail in any way
            raise InputError(f"the chat template failed on the messages: {_brief(error)}") from error

    def _further(self, variables: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
        own = {*_VARIABLES, *special_tokens, *self._environment.globals}
        for name in variables:
            if name in own or not name.isidentifier():
                raise InputError(f"chat_template_kwargs cannot set {_one_line(name)!r}")
        return dict(variables)

    def _collect(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_PROMPT_CHARS:
                raise InputError(f"the chat template writes more than {MAX_PROMPT_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    today: datetime.date | None = None,
) -> str:
    """Renders once. Whoever renders often keeps a `ChatTemplate`, since compiling costs more than rendering."""
    return ChatTemplate(template, today=today).render(
        messages, special_tokens=special_tokens, add_generation_prompt=add_generation_prompt, tools=tools
    )


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InputError("messages must be a non-empty list")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{index}] must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InputError(f"messages[{index}].{key} must be a string")
        if message["role"] not in ROLES:
            known = ", ".join(ROLES)
            raise InputError(f"messages[{index}].role {_one_line(message['role'])!r} is unknown; known roles: {known}")
    return [dict(message) for message in messages]


def _input_chars(
    conversation: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> int:
    """How much the input holds; refuses what is too large or not plain data."""
    if sum(len(message["content"]) for message in conversation) > MAX_PROMPT_CHARS:
        raise InputError(f"messages hold more than {MAX_PROMPT_CHARS} characters")
    budget = Budget(BASE_CHARS, MAX_SECONDS)
    for name, values in (("messages", conversation), ("tools", tools or []), ("chat_template_kwargs", [variables])):
        for index, value in enumerate(values):
            try:
                budget.weigh(value)
            except TemplateError as error:
                raise InputError(f"{name}[{index}]: {_brief(error)}") from error
    return BASE_CHARS - budget.chars_left


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _format_date(date: datetime.date, pattern: str) -> str:
    """`strftime` without locale, time of day or padding widths."""

    def expand(match: re.Match[str]) -> str:
        if match[0] not in _DATE_FORMATS:
            raise TemplateError(f"strftime_now does not know {match[0]!r}")
        return _DATE_FORMATS[match[0]](date)

    return re.sub(r"%-?.?", expand, pattern)


def _brief(error: Exception) -> str:
    return _one_line(str(error) or type(error).__name__)


def _one_line(text: str) -> str:
    """What an error says, printable and short: templates may put anything into it."""
    shown = "".join(c if c.isprintable() else " " for c in text[:_MAX_BRIEF_CHARS])
    return shown if len(text) <= _MAX_BRIEF_CHARS else shown + "..."
