"""Options that several commands share, each described once; and what becomes of them: parameters and a loaded model.

Commands hand over `ctx.params`, all their options by name, so that no list of options is written twice. Errors about
options speak of flags as they are typed: `naming_flags` is the one place that knows how fields are spelt there.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verispec.cli import terminal
from verispec.errors import InputError
from verispec.types import Accept as RuleOfAcceptance

if TYPE_CHECKING:
    from verispec.llm import LLM
    from verispec.types import SamplingParams

_SAMPLING, _SPEED, _MODEL = "Sampling", "Drafting and speed", "Model"
_MAX_SLOTS = 2**31 - 1

# Fields whose flag is not their own name with dashes.
_FLAGS = {"num_slots": "--kv-slots", "max_draft": "--draft-len", "n": "-n"}
_OTHER_FIELDS = (
    "num_slots", "max_draft", "max_len", "threads", "drafter", "draft_model", "tree", "accept", "backend", "weights",
)  # fmt: skip
_LOADING = (
    "model", "drafter", "draft_model", "tree", "accept", "backend", "threads", "weights", "kv_slots", "max_len",
    "draft_len", "force",
)  # fmt: skip


class Colour(StrEnum):
    """What --color can show."""

    DRAFTS = "drafts"


def known_models() -> list[str]:
    """For shell completion."""
    from verispec.model import hub

    return list(hub.known_models())


def drafters() -> list[str]:
    """For shell completion."""
    from verispec.spec.registry import DRAFTER_NAMES

    return list(DRAFTER_NAMES)


Model = Annotated[
    str,
    typer.Option(
        "-m", "--model", rich_help_panel=_MODEL,
        help="A known name (`verispec models list`), a GGUF file, a folder with config.json and safetensors, or a hub "
        "id (org/name).",
        autocompletion=known_models,
    ),
]  # fmt: skip
Backend = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_MODEL,
        help="What runs the model. native: C++ kernels on the file's own quantised blocks, the same bits on every CPU. "
        "numpy: float32. Default: native where it was built.",
        autocompletion=lambda: ["native", "numpy"],
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        rich_help_panel=_MODEL,
        help="as-stored: as the file has them. q8: the native backend quantises float weights to 8 bits at load, which "
        "is part of the profile.",
        autocompletion=lambda: ["as-stored", "q8"],
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(rich_help_panel=_MODEL, help="Threads that compute; their number changes no bit. Default: all cores."),
]
KVSlots = Annotated[
    int,
    typer.Option(rich_help_panel=_MODEL, max=_MAX_SLOTS, help="K/V capacity in tokens, for all requests together."),
]
MaxLen = Annotated[
    int | None,
    typer.Option(rich_help_panel=_MODEL, help="The most tokens of one request, prompt included. Default: the context."),
]

MaxTokens = Annotated[int, typer.Option(rich_help_panel=_SAMPLING, help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(rich_help_panel=_SAMPLING, help="0 is greedy.")]
TopK = Annotated[int, typer.Option(rich_help_panel=_SAMPLING, help="Sample from the k most likely tokens; 0 is off.")]
TopP = Annotated[
    float,
    typer.Option(rich_help_panel=_SAMPLING, help="Sample from the fewest tokens with this probability; 1 is off."),
]
MinP = Annotated[
    float,
    typer.Option(rich_help_panel=_SAMPLING, help="Drop tokens less likely than this share of the best; 0 is off."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(rich_help_panel=_SAMPLING, help="Divide the logits of tokens seen in prompt or answer; 1 is off."),
]
PresencePenalty = Annotated[
    float, typer.Option(rich_help_panel=_SAMPLING, help="Subtract this from tokens that the answer holds; 0 is off.")
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(rich_help_panel=_SAMPLING, help="Subtract this for each time the answer holds a token; 0 is off."),
]
Seed = Annotated[
    int | None,
    typer.Option(rich_help_panel=_SAMPLING, help="Seed of the noise. Default: a random one, which is shown."),
]
Stop = Annotated[
    list[str] | None, typer.Option(rich_help_panel=_SAMPLING, help="End before this text. May be given several times.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", rich_help_panel=_SAMPLING, help="Go on after the end-of-text token.")
]
Samples = Annotated[int, typer.Option("-n", rich_help_panel=_SAMPLING, help="Samples per prompt.")]

Drafter = Annotated[
    str,
    typer.Option(
        rich_help_panel=_SPEED,
        help="none: plain decoding. ngram: what followed the last words before. decode: regular decoding in batches of "
        "any shape, replayed in canonical passes. skip: the model itself with sub-layers skipped (`verispec tune`). "
        "model: a smaller model, --draft-model. auto: what is predicted to be fastest. Changes the speed, never the "
        "output.",
        autocompletion=drafters,
    ),
]
DraftLen = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=_SPEED,
        help="The most tokens to draft before they are verified. Default: ngram 16, decode 32, skip 12, model 8.",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_SPEED,
        help="A smaller model with the same vocabulary, for --drafter model; named like --model.",
        autocompletion=known_models,
    ),
]
Tree = Annotated[
    str | None,
    typer.Option(
        metavar="SHAPE",
        rich_help_panel=_SPEED,
        help="Shape of the drafts of skip and model. chain:N: N tokens in a row. branch:3,2,1: so many children for "
        "each node of a level. beam:W,L: the W best sequences at each of L levels.",
    ),
]
Accept = Annotated[
    RuleOfAcceptance,
    typer.Option(
        rich_help_panel=_SPEED,
        help="Rule that accepts drafts. match: those the model would have drawn; the same tokens whatever the drafter. "
        "rejection (chains), recursive (trees): by the probabilities of draft and target; equally distributed, but the "
        "tokens depend on the drafter, so they need --no-deterministic.",
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", rich_help_panel=_SPEED, help="Let skip and model draft even where that is predicted not to pay."
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        rich_help_panel=_SPEED,
        help="Commit only what canonical passes confirm. Without it the last bits depend on what else runs.",
    ),
]
System = Annotated[str | None, typer.Option(help="System message for the chat template.")]


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among a command's options."""
    from verispec.types import SamplingParams

    names = {f.name for f in fields(SamplingParams)}
    chosen = {name: value for name, value in given.items() if name in names}
    with naming_flags():
        return SamplingParams(**{**chosen, "stop": tuple(chosen.get("stop") or ())})


def load_llm(given: Mapping[str, Any], *, quiet: bool = False, **more: Any) -> LLM:
    """The model that a command's options name, loaded; how far it is shows on stderr."""
    from verispec.cli.progress import LoadingDisplay
    from verispec.llm import LLM

    chosen = {name: given[name] for name in _LOADING if name in given}
    if chosen.get("tree") is not None and chosen.get("draft_len") is not None:
        raise InputError("--tree and --draft-len exclude each other: --draft-len N is short for --tree chain:N")
    if given.get("accept", RuleOfAcceptance.MATCH) != RuleOfAcceptance.MATCH and given.get("deterministic", True):
        raise InputError(
            f"--accept {given['accept']} lets tokens depend on the drafter, the tree and the load, so it needs "
            "--no-deterministic"
        )
    if chosen.get("draft_model") is not None and chosen.get("drafter") not in ("model", "auto"):
        raise InputError("--draft-model is for --drafter model or auto")
    if not quiet:
        _note_backend(chosen)
    with naming_flags(), LoadingDisplay(quiet=quiet) as display:
        llm = LLM(progress=display.update, **chosen, **more)
    atexit.register(llm.calibration.save)
    return llm


def _note_backend(chosen: Mapping[str, Any]) -> None:
    """Say what a user would want to know of the backend: that the fast one is missing, that weights are changed."""
    from verispec.backends.select import QUANTISED, what_is_lost

    lost = what_is_lost() if chosen.get("backend") is None else None
    if lost is not None:
        terminal.note(lost)
    if chosen.get("weights") == QUANTISED:
        terminal.note("float weights are quantised to 8 bits at load; the profile says so")


@contextmanager
def naming_flags() -> Iterator[None]:
    """Errors from inside name the flag as typed instead of the field."""
    try:
        yield
    except InputError as error:
        raise InputError(in_flags(str(error))) from error


def in_flags(message: str) -> str:
    """An error's sentence, which begins with a field (or "unknown", and then one), in terms of flags."""
    from verispec.types import SamplingParams

    names = {*_OTHER_FIELDS, *(f.name for f in fields(SamplingParams))}

    def flag(match: re.Match[str]) -> str:
        name = match[0]
        return _FLAGS.get(name, "--" + name.replace("_", "-")) if name in names else name

    if " nor a known model" in message and not message.startswith("draft_model"):
        return f"--model: {message}"
    message = re.sub(r"(?<=^unknown )\w+|^\w+", flag, message)
    message = message.replace("to num_slots (", "to --kv-slots (")  # max_len is bounded by the capacity
    return message.replace("deterministic=False", "--no-deterministic").replace("a draft_model", "--draft-model")
