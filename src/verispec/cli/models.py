"""`verispec models`: what is known, what is here, how large it is."""

from __future__ import annotations

from typing import Annotated

import typer

from verispec.errors import InputError

app = typer.Typer(help="Models on this machine: list, pull, remove, path.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A known model's name.")]


@app.command("list")
def list_models() -> None:
    """Show the known models, their sizes, and whether they are here."""
    from verispec.model.hub import REGISTRY, cached_path

    for model in REGISTRY.values():
        path = cached_path(model.name)
        state = f"here: {path}" if path is not None else "not fetched"
        typer.echo(f"{model.name:16} {model.nbytes / 1e6:7.1f} MB  {model.licence:12} {state}")


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A known name, or a hub id such as org/name.")] = "smollm2-135m",
) -> None:
    """Fetch a model into the cache, if it is not there, and print its path."""
    from verispec.cli.progress import LoadingDisplay
    from verispec.model.hub import resolve

    with LoadingDisplay() as display:
        path = resolve(name, progress=lambda stage, done, total: display.update(stage, done / max(1, total)))
    typer.echo(path)


@app.command()
def remove(name: Name) -> None:
    """Delete a fetched model from the cache."""
    from verispec.model.hub import cached_path

    path = cached_path(name)
    if path is None:
        raise InputError(f"{name} is not in the cache")
    nbytes = path.stat().st_size
    path.unlink()
    typer.echo(f"removed {path} ({nbytes / 1e6:.1f} MB)")


@app.command("path")
def show_path(name: Name) -> None:
    """Print where a fetched model is."""
    from verispec.model.hub import cached_path

    path = cached_path(name)
    if path is None:
        raise InputError(f"{name} is not in the cache; `verispec models pull {name}` fetches it")
    typer.echo(path)
