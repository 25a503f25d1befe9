"""Options that several commands share, each described once. Knows typer; knows nothing of models."""

from __future__ import annotations

from typing import Annotated

import typer

_SAMPLING, _SPEED, _MODEL = "Sampling", "Drafting and speed", "Model"

Model = Annotated[
    str,
    typer.Option(
        "-m", "--model", rich_help_panel=_MODEL,
        help="A known name, a GGUF file, a folder with safetensors, or a hub id such as org/name.",
    ),
]  # fmt: skip
Backend = Annotated[str, typer.Option(rich_help_panel=_MODEL, help="What runs the model: numpy.")]
Threads = Annotated[
    int | None,
    typer.Option(rich_help_panel=_MODEL, help="Threads of the arithmetic; part of the profile. Default: all cores."),
]
KVSlots = Annotated[int, typer.Option(rich_help_panel=_MODEL, help="K/V capacity in tokens, for all requests.")]
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
    str, typer.Option(rich_help_panel=_SPEED, help="ngram or none. Changes the speed, never the output.")
]
DraftLen = Annotated[int, typer.Option(rich_help_panel=_SPEED, help="The most tokens to draft at once.")]
Accept = Annotated[str, typer.Option(rich_help_panel=_SPEED, help="Rule that accepts drafts: match.")]
Deterministic = Annotated[
    bool,
    typer.Option(
        rich_help_panel=_SPEED,
        help="Commit only what canonical passes confirm. Without it the last bits depend on what else runs.",
    ),
]
System = Annotated[str | None, typer.Option(help="System message for the chat template.")]
