"""Options that several commands share, each a field with its help; and what becomes of them: parameters and a model.

What agrees is accepted, what contradicts is refused, what has no effect is said. Errors about options speak of flags as
they are typed: `naming_flags` is the one place that knows how fields are spelt there.
"""

from __future__ import annotations

import atexit
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from verispec.cli import terminal
from verispec.cli.parser import flags, option
from verispec.config import DEFAULTS
from verispec.errors import InputError
from verispec.spec.tree import TreeShape
from verispec.types import CONSTRAINTS, Accept, SamplingParams

if TYPE_CHECKING:
    from verispec.llm import LLM

MAX_COUNT = 2**31 - 1
_RANDOM_SEEDS = 10**9  # random seeds are below this: short enough to be typed again
_PARAMS = SamplingParams()
_NEEDED_BY = {"draft_model": ("model", "auto"), "force": ("skip", "model", "auto")}  # drafters, by option


def known_models() -> list[str]:
    """For shell completion."""
    from verispec.model import hub

    return list(hub.known_models())


def drafters() -> list[str]:
    """For shell completion."""
    from verispec.spec.registry import DRAFTER_NAMES

    return list(DRAFTER_NAMES)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Which model is loaded and how; the names are those of LLM."""

    title: ClassVar = "Model"
    model: str | None = option(
        "smollm2-135m", "-m", metavar="NAME", values=known_models,
        help="a known name (`verispec models`), a GGUF file, a folder with config.json and safetensors, or a hub id "
        "(org/name)",
    )  # fmt: skip
    backend: str | None = option(
        None, metavar="NAME", values=lambda: ("cuda", "native", "numpy", "hopper", "torch"),
        help="cuda: an NVIDIA GPU. native: C++ kernels, the same bits on every CPU. numpy: float32. hopper: the bits "
        "of cuda on a CPU, slowly. torch: any GPU that torch has. Default: the best that can serve here",
    )  # fmt: skip
    weights: str = option(
        "as-stored", metavar="KIND", values=lambda: ("as-stored", "q8"),
        help="q8: quantise float weights to 8 bits at load (native), which is part of the profile",
    )  # fmt: skip
    threads: int | None = option(None, "-t", help="threads (numpy: one); changes no bit. Default: all cores")
    device: int = option(0, bounds=(0, MAX_COUNT), help="which GPU, by number (cuda, torch)")
    gpu_memory: float = option(0.9, help="share of the GPU's memory to use (cuda, torch)")
    fast_weights: str = option(
        "same", metavar="KIND", values=lambda: ("same", "int4", "int8", "fp8"),
        help="weights by which --drafter decode draws what is verified later (cuda); changes no output",
    )  # fmt: skip
    kv_slots: int | None = option(
        None, bounds=(2, MAX_COUNT),
        help=f"K/V capacity in tokens, for all requests together. Default: {DEFAULTS.num_slots}; what fits (on a GPU)",
    )  # fmt: skip
    max_len: int | None = option(
        None, help="the most tokens of one request, prompt included. Default: the model's context"
    )


@dataclass(frozen=True, kw_only=True)
class Drafting:
    title: ClassVar = "Drafting (changes the speed, never the output)"
    drafter: str | None = option(
        None, metavar="NAME", values=drafters,
        help="none: plain decoding. suffix: what followed the last words before. lookup: the same, by the backend "
        "itself. decode: batches of any shape, verified later. grammar: what a schema or grammar forces. skip: the "
        "model with sub-layers skipped. model: --draft-model. auto: what is predicted to be fastest. Default: auto "
        "(backends numpy and torch: suffix, or model with --draft-model)",
    )  # fmt: skip
    draft_len: int | None = option(
        None, help="the most tokens of one draft. Default: suffix 32, lookup 8, grammar 32, decode 32, skip 12, model 8"
    )
    draft_model: str | None = option(
        None, metavar="NAME", values=known_models, help="a smaller model with the same vocabulary; named like --model"
    )
    tree: str | None = option(
        None, metavar="SHAPE",
        help="shape of drafts of suffix, skip and model. chain:N: in a row. branch:3,2,1: children per node of a "
        "level. beam:W,L: the W best sequences at each of L levels",
    )  # fmt: skip
    force: bool = option(False, help="let skip and model draft even where that is predicted not to pay")
    accept: str = option(
        str(Accept.MATCH), metavar="RULE", choices=tuple(map(str, Accept)),
        help="match: the token the model draws itself. rejection (chains), recursive (trees): by probabilities; the "
        "tokens then depend on the drafter, so they need --no-deterministic",
    )  # fmt: skip

    def method(self, llm: LLM) -> str:
        """The drafter that is named, or else the default of the model that was loaded."""
        return llm.chosen(self.drafter, None).method

    def given_in_vain(self, method: str) -> list[str]:
        """The options that say nothing to this drafter."""
        return [name for name, methods in _NEEDED_BY.items() if getattr(self, name) and method not in methods]

    def for_llm(self, deterministic: bool, *, quiet: bool) -> dict[str, Any]:
        """As arguments of LLM, without what agrees with the rest or has no effect. Raises for what contradicts it."""
        chosen = asdict(self)
        if self.accept != Accept.MATCH and deterministic:
            raise InputError(
                f"--accept {self.accept} lets tokens depend on the drafter, the tree and the load, so it needs "
                "--no-deterministic"
            )
        if self.tree is not None and self.draft_len is not None:
            with naming_flags():
                agrees = TreeShape.parse(self.tree).depth == self.draft_len
            if not agrees:
                raise InputError(f"--tree {self.tree} and --draft-len {self.draft_len} contradict each other")
            chosen["draft_len"] = None
        if self.drafter is not None:
            chosen |= {name: getattr(Drafting, name) for name in self.given_in_vain(self.drafter)}
            self.note_no_effect(self.drafter, quiet=quiet)
        return chosen

    def note_no_effect(self, method: str, *, quiet: bool) -> None:
        for name in self.given_in_vain(method):
            no_effect(_FLAGS[name], f"with --drafter {method}", quiet=quiet)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request samples and when it ends; the names are those of SamplingParams."""

    title: ClassVar = "Sampling"
    max_tokens: int = option(_PARAMS.max_tokens, help="the most tokens to generate")
    temperature: float | None = option(_PARAMS.temperature, "--temp", help="0 is greedy")
    top_k: int | None = option(_PARAMS.top_k, help="sample from the k most likely tokens; 0 is off")
    top_p: float | None = option(_PARAMS.top_p, help="sample from the fewest tokens with this probability; 1 is off")
    min_p: float | None = option(_PARAMS.min_p, help="drop tokens less likely than this share of the best; 0 is off")
    repetition_penalty: float | None = option(
        _PARAMS.repetition_penalty, help="divide the logits of tokens seen in prompt or answer; 1 is off"
    )
    presence_penalty: float = option(
        _PARAMS.presence_penalty, help="subtract this from tokens that the answer holds; 0 is off"
    )
    frequency_penalty: float = option(
        _PARAMS.frequency_penalty, help="subtract this for each time the answer holds a token; 0 is off"
    )
    seed: int | None = option(
        None, help="seed of the noise. Default: a random one, which is shown; of --prompts, the line's number"
    )
    stop: tuple[str, ...] = option((), help="end before this text; may be given several times")
    ignore_eos: bool = option(False, help="go on after the end-of-text token")
    n: int = option(1, help="samples per prompt")
    deterministic: bool = option(
        True, help="commit what no canonical pass has confirmed: faster, and the last bits depend on what else runs"
    )

    def params(self, **instead: Any) -> SamplingParams:
        """As the library takes them; `instead` stands in for what is None, by name."""
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        with naming_flags():
            return SamplingParams(**{**instead, **chosen})

    def note_no_effect(self, *, quiet: bool) -> None:
        if self.temperature == 0:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) != getattr(Sampling, name):
                    no_effect(_FLAGS[name], "at temperature 0", quiet=quiet)
            if self.n > 1:
                no_effect("-n", "at temperature 0: all samples are the same", quiet=quiet)

    def seeded(self, **instead: Any) -> SamplingParams:
        """`params` with a seed in any case. Greedy answers do not depend on it, so theirs is always the same."""
        return self.params(seed=secrets.randbelow(_RANDOM_SEEDS) if self.temperature else 0, **instead)


def load_llm(
    loading: Loading, drafting: Drafting | None = None, *, deterministic: bool = True, quiet: bool = False, **more: Any
) -> LLM:
    """The model that a command's options name, loaded; how far it is shows on stderr."""
    from verispec.cli.progress import LoadingDisplay
    from verispec.llm import LLM

    chosen = llm_arguments(loading, drafting, deterministic=deterministic, quiet=quiet)
    with naming_flags(), LoadingDisplay(quiet=quiet) as display:
        llm = LLM(progress=display.update, **{**chosen, **more})
    if drafting is not None and drafting.drafter is None:  # the backend had to be known for it
        drafting.note_no_effect(drafting.method(llm), quiet=quiet)
    atexit.register(llm.calibration.save)
    return llm


def llm_arguments(
    loading: Loading, drafting: Drafting | None, *, deterministic: bool = True, quiet: bool
) -> dict[str, Any]:
    """What a command's options say to LLM, with notes on what a user would want to know of it. The backend is named, so
    that LLM does not log what the notes say."""
    from verispec.backends.select import default_backend

    chosen = {**asdict(loading), **(drafting.for_llm(deterministic, quiet=quiet) if drafting is not None else {})}
    if not quiet:
        _note_backend(loading)
    return {**chosen, "backend": loading.backend or default_backend()}


def check_system(system: str | None, *, raw: bool = False) -> None:
    if raw and system is not None:
        raise InputError("--system needs the chat template, which --raw turns off")
    terminal.checked(system or "", name="--system")


def prompt_ids(llm: LLM, text: str, *, system: str | None, raw: bool) -> list[int]:
    """What the model gets of a prompt, through its chat template or as it is."""
    if raw:
        return llm.tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_ids([*messages, {"role": "user", "content": text}])


def no_effect(what: str, why: str, *, quiet: bool) -> None:
    if not quiet:
        terminal.note(f"note: {what} has no effect {why}")


def _note_backend(loading: Loading) -> None:
    """Say what a user would want to know of the backend: that the fast one is missing, that weights are changed."""
    from verispec.backends.options import QUANTISED
    from verispec.backends.select import default_backend, what_is_lost

    lost = what_is_lost(default_backend()) if loading.backend is None else None
    if lost is not None:
        terminal.note(lost)
    if loading.weights == QUANTISED:
        terminal.note("float weights are quantised to 8 bits at load; the profile says so")


# Names of the library whose options are called otherwise.
_INNER_NAMES = {"num_slots": "kv_slots", "max_draft": "draft_len"}
_FLAGS = {one.name: flags(one)[0] for group in (Loading, Drafting, Sampling) for one in fields(group)}
_FLAGS |= {inner: _FLAGS[name] for inner, name in _INNER_NAMES.items()} | {"deterministic": "--deterministic"}
_FLAGS |= {name: f"--{name}" for name in CONSTRAINTS}


@contextmanager
def naming_flags() -> Iterator[None]:
    """Errors from inside name the flag as typed instead of the field."""
    try:
        yield
    except InputError as error:
        raise InputError(in_flags(str(error))) from error


def in_flags(message: str) -> str:
    """An error's sentence, which begins with a field (or "unknown", and then one), in terms of flags."""
    if " nor a known model" in message and not message.startswith("draft_model"):
        return f"--model: {message}"
    message = re.sub(r"(?<=^unknown )\w+|^\w+", lambda match: _FLAGS.get(match[0], match[0]), message)
    message = message.replace("to num_slots (", "to --kv-slots (")  # max_len is bounded by the capacity
    return message.replace("deterministic=False", "--no-deterministic").replace("a draft_model", "--draft-model")
