"""`verispec verify`: the promise, tried out on one request and printed as tables.

What is run and compared is `demonstration`; here it becomes text, JSON and an exit code. Rows are printed as they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from verispec.cli import options, terminal
from verispec.cli.main import EXIT_DEFECT
from verispec.cli.parser import argument, option
from verispec.errors import InputError

if TYPE_CHECKING:
    from verispec.backends.blas import LibraryRow
    from verispec.cli.demonstration import Case, FastCase
    from verispec.llm import LLM
    from verispec.types import SamplingParams

_MAX_CROWD = 64
_CASE_ROW = "{:14}  {:7}  {:16.16}  {:5}  {}"
_FAST_ROW = "{:>9}  {:16.16}  {:22}  {}"
_LIBRARY_ROW = "{:>9}  {:18}  {}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    title: ClassVar = "Options"
    prompt: str = argument(metavar="PROMPT", help="the prompt")
    system: str | None = option(None, help="system message for the chat template")
    raw: bool = option(False, help="continue the prompt as it is, without chat template")
    crowd: int = option(7, bounds=(1, _MAX_CROWD), help="other requests to run beside it")
    json: bool = option(False, help="print one JSON object instead of the tables")


def verify(trial: Trial, sampling: options.Sampling, loading: options.Loading) -> int:
    """Try the promise out: run one request in many situations and compare the bits of its outputs.

    The request runs alone (the reference), with a warm cache, amid a crowd of other requests, as the first and the last
    of them, preempted and computed again, with its prompt cut into small chunks, and with every drafter. Each run gives
    a digest over its tokens and log-probabilities, and all digests must be equal.

    Then it runs on fast passes, which promise nothing (`deterministic=False`): alone and in crowds, in engines that
    have such passes even where every shape could be canonical. With the numpy backend the last bits usually depend on
    the crowd there, and in time the tokens do. That is no failure, it is what the promise is for. With the native
    backend nothing differs, as its kernels compute each row by itself; a third table shows how the rows of a library's
    matrix product differ.

    Exit code 0: all digests are equal. 1: one differs, which is a defect. 2: bad input.
    """
    options.check_system(trial.system, raw=trial.raw)
    terminal.checked(trial.prompt, name="the prompt argument")
    if not trial.prompt.strip():
        raise InputError("the prompt is empty")
    params = sampling.params()
    llm = options.load_llm(loading, drafter="none", force=True)
    prompt_ids = options.prompt_ids(llm, trial.prompt, system=trial.system, raw=trial.raw)
    different = _demonstrate(llm, prompt_ids, params, crowd=trial.crowd, as_json=trial.json)
    if different:
        names = ", ".join(f'"{case.name}" (drafter {case.drafter})' for case in different)
        terminal.note(
            f"verispec: the promise is broken: {names} did not give the bits of the reference. This is a defect; "
            '"If something differs" in docs/determinism.md says what to do.'
        )
    return EXIT_DEFECT if different else 0


def _demonstrate(llm: LLM, prompt_ids: list[int], params: SamplingParams, *, crowd: int, as_json: bool) -> list[Case]:
    """Run everything and print it; returns the cases that differ."""
    from verispec.cli.demonstration import Demonstration
    from verispec.cli.progress import CountDisplay

    shown = Demonstration(llm, prompt_ids, params, crowd=crowd)
    cases: list[Case] = []
    fast_cases: list[FastCase] = []
    with CountDisplay("verifying", shown.num_cases + shown.num_fast_cases) as display:

        def put(text: str) -> None:
            if not as_json:
                with display.aside():
                    terminal.out(text.rstrip(" ") + "\n")

        put(
            f"One request: {shown.num_prompt_tokens} prompt tokens, at most {params.max_tokens} new ones, temperature "
            f"{params.temperature:g}, seed {params.seed}.\n"
            "Promised: every bit of its tokens and log-probabilities depends on the weights, the\n"
            "prompt, the parameters, the seed and the profile, and on nothing else.\n"
        )
        put(_CASE_ROW.format("case", "drafter", "digest", "equal", "what was different"))
        for case in shown.cases():
            equal = "yes" if case.is_equal else "NO"
            put(_CASE_ROW.format(case.name, case.drafter, case.run.output.digest, equal, case.difference))
            cases.append(case)
            display.advance()
        put(f"\n{_outcome(cases)}\n\nThe same on fast passes, which promise nothing (deterministic=False):\n")
        put(_FAST_ROW.format("beside it", "digest", "tokens", "log-probabilities, compared with the first row"))
        for fast_case in shown.fast_cases():
            put(_fast_row(fast_case))
            fast_cases.append(fast_case)
            display.advance()
        cannot_differ = shown.has_only_pure_passes and all(case.comparison.is_equal for case in fast_cases)
        library_rows = shown.library_rows() if cannot_differ else []
        put("\n" + (_why_equal(library_rows, llm) if library_rows else _fast_outcome(fast_cases)))
    if as_json:
        terminal.out_json(_as_object(cases, fast_cases, library_rows, profile=llm.profile))
    else:
        terminal.note(f"profile {llm.profile}")
    return [case for case in cases if not case.is_equal]


def _outcome(cases: list[Case]) -> str:
    num_equal = sum(case.is_equal for case in cases)
    if num_equal < len(cases):
        return f"{len(cases) - num_equal} of {len(cases)} digests DIFFER from the reference."
    missing = sum(not case.took_place for case in cases)
    note = f" ({missing} of the cases did not take place as meant: see their rows.)" if missing else ""
    num_tokens = len(cases[0].run.output.token_ids)
    return f"All {len(cases)} digests are equal, each over {num_tokens} tokens and their log-probabilities.{note}"


def _fast_row(case: FastCase) -> str:
    found, digest = case.comparison, case.run.output.digest
    if case.num_others == 0:
        return _FAST_ROW.format("alone", digest, "", "")
    tokens = "equal" if found.first_other_token is None else f"differ from token {found.first_other_token + 1}"
    logprobs = f"{found.num_different} of {found.num_compared} differ"
    if found.first_different is not None:
        logprobs += f", first at token {found.first_different + 1}, by at most {found.largest_difference:.1g}"
    return _FAST_ROW.format(case.run.num_beside, digest, tokens, logprobs)


def _fast_outcome(cases: list[FastCase]) -> str:
    if all(case.comparison.is_equal for case in cases):
        return "No difference seen: here, fast passes of these sizes happen to give equal bits. Nothing promises it."
    changed = "bits, and then tokens" if any(c.comparison.first_other_token is not None for c in cases) else "bits"
    return f"Here the crowd changes {changed}: a fast pass has any number of rows, and its arithmetic depends on that."


def _why_equal(rows: list[LibraryRow], llm: LLM) -> str:
    """Why fast passes cannot differ here, and a table of how they do where a library multiplies matrices."""
    from verispec.backends.blas import blas_name

    arch = llm.architecture
    table = [
        _LIBRARY_ROW.format(row.num_others, f"{row.num_different} of {row.num_values}", f"{row.largest_difference:.1g}")
        for row in rows
    ]
    return "\n".join(
        [
            "No difference, by construction: the native kernels compute each row of a pass by itself,",
            "in one order of operations, however many rows there are. So fast passes give the same bits.",
            "A library chooses its order by the number of rows. One row times a matrix of this model's",
            f"size ({arch.mlp_size} x {arch.hidden_size}), by numpy on {blas_name()}, compared with the row alone:\n",
            _LIBRARY_ROW.format("beside it", "values that differ", "by at most"),
            *table,
            "\n--backend numpy shows what that does to this request.",
        ]
    )


def _as_object(
    cases: list[Case], fast_cases: list[FastCase], library_rows: list[LibraryRow], *, profile: str
) -> dict[str, Any]:
    reference = cases[0].run.output
    return {
        "equal": all(case.is_equal for case in cases),
        "digest": reference.digest,
        "text": reference.text,
        "token_ids": list(reference.token_ids),
        "prompt_tokens": reference.prompt_len,
        "seed": reference.seed,
        "profile": profile,
        "cases": [_case_object(case) for case in cases],
        "fast": [_fast_object(case) for case in fast_cases],
        "library": [row._asdict() for row in library_rows],
    }


def _case_object(case: Case) -> dict[str, Any]:
    output = case.run.output
    result = {
        "case": case.name,
        "drafter": case.drafter,
        "digest": output.digest,
        "equal": case.is_equal,
        "took_place": case.took_place,
        "beside": case.run.num_beside,
        "steps_to_first_token": case.run.num_steps_to_first,
        **{name: getattr(output.stats, name) for name in ("cached_tokens", "preemptions", "drafted", "accepted")},
    }
    return result if output.error is None else {**result, "error": output.error}


def _fast_object(case: FastCase) -> dict[str, Any]:
    compared = {name.removeprefix("num_"): value for name, value in case.comparison._asdict().items()}
    return {"beside": case.run.num_beside, "digest": case.run.output.digest, **compared}
