"""Prompts of a Ray Data set, answered: a step of a pipeline over many nodes that gives the bytes of one process.

An answer depends on its row alone, so blocks, actors and restarts change nothing. What is finished outlives a killed
job twice: Ray's own checkpoint (`DataContext.checkpoint_config`) leaves out rows that were written, and our journals,
one per actor in a shared folder, hold every row that was answered, written or not.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.data import ActorPoolStrategy, Dataset

from verispec.batch.journal import InUseError, Journal
from verispec.batch.lines import derived
from verispec.errors import InputError
from verispec.llm import LLM, Completion
from verispec.types import MAX_SEED_BITS, SamplingParams


class Answerer:
    """One model, loaded once per actor; rows in, the same rows with their answers out."""

    def __init__(
        self, load: Mapping[str, Any], params: Mapping[str, Any], columns: tuple[str, str, str], folder: str | None
    ) -> None:
        self._llm = LLM(**load)
        self._params = dict(params)
        self._prompt, self._text, self._id = columns
        self._journals = None if folder is None else Journals(Path(folder), self._parts())

    def _parts(self) -> dict[str, str]:
        """What an answer is a function of, beside its row."""
        files = " ".join(file.sha256 for file in self._llm.identity.files)
        return {"profile": self._llm.profile, "model": files, "params": json.dumps(self._params, sort_keys=True)}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [_plain(value) for value in batch[self._prompt]]
        names = [str(value) for value in batch[self._id]] if self._id else [""] * len(prompts)
        keys = [derived(name, json.dumps(prompt)) for name, prompt in zip(names, prompts, strict=True)]
        known = {} if self._journals is None else self._journals.known
        missing = [i for i, key in enumerate(keys) if key not in known]
        found = {key: known[key] for key in keys if key in known}

        def keep(at: int, completion: Completion) -> None:
            key = keys[missing[at]]
            found[key] = {
                self._text: completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": str(completion.finish_reason),
                "digest": completion.digest,
            }
            if self._journals is not None:
                self._journals.note(key, found[key])

        self._llm.generate(
            [prompts[i] for i in missing], [_seeded(self._params, keys[i]) for i in missing], on_finish=keep
        )
        for column in (self._text, "token_ids", "finish_reason", "digest"):
            batch[column] = [found[key][column] for key in keys]
        return batch


class Journals:
    """Answers by row, in a folder that actors share: each reads what earlier ones left, and writes a journal of its
    own. Refuses those of another model or of other parameters.
    """

    def __init__(self, folder: Path, parts: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.journal")):
            with suppress(InUseError), Journal.open(path) as journal:
                journal.check(parts)
                for line in journal.finished:
                    record = journal.record(line)
                    self.known[record["key"]] = record
        self._own = Journal.open(folder / f"{uuid.uuid4().hex}.journal")
        self._own.begin(parts)

    def note(self, key: str, answer: dict[str, Any]) -> None:
        """A row was answered."""
        self.known[key] = answer
        self._own.finish(len(self._own.finished), {"key": key, **answer})


def map_prompts(
    dataset: Dataset,
    *,
    model: str,
    params: Mapping[str, Any] | None = None,
    prompt_column: str = "prompt",
    text_column: str = "text",
    id_column: str = "",
    actors: int | tuple[int, int] = 1,
    batch_size: int = 32,
    gpus: float = 0,
    cpus: float = 1,
    resources: Mapping[str, float] | None = None,
    llm: Mapping[str, Any] | None = None,
    journal: str | None = None,
) -> Dataset:
    """The data set with answers: columns for text, `token_ids`, `finish_reason` and `digest`.

    `params` are the fields of SamplingParams. Without a seed, each row's is made from its id, where there is an
    `id_column`, and its prompt, so that it has the same answer in every run. Each of the `actors` (a number, or bounds)
    has a model of its own, loaded with the options `llm`, and `gpus`, `cpus` and `resources` set aside for it.
    `journal` is a folder that all nodes reach: rows that were answered before, by a job that was killed, are taken from
    there.
    """
    chosen = dict(params or {})
    if "n" in chosen and chosen["n"] != 1:
        raise InputError("n must be 1: a row has one answer")
    SamplingParams.from_mapping(chosen)  # what is wrong is said here, not on another machine
    low, high = (actors, actors) if isinstance(actors, int) else actors
    return dataset.map_batches(
        Answerer,
        fn_constructor_args=({"model": model, **(llm or {})}, chosen, (prompt_column, text_column, id_column), journal),
        compute=ActorPoolStrategy(min_size=low, max_size=high),
        batch_size=batch_size,
        num_gpus=gpus or None,
        num_cpus=cpus,
        resources=dict(resources) if resources else None,
    )


def _seeded(params: Mapping[str, Any], key: str) -> dict[str, Any]:
    """With a seed: the one that was given, or one that stands for the row."""
    return {"seed": int(key, 16) % 2**MAX_SEED_BITS, **params}


def _plain(value: Any) -> Any:
    """A prompt as LLM takes it: text, or a list of token ids where Ray has an array."""
    return value if isinstance(value, str) else [int(token_id) for token_id in value]
