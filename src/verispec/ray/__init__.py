"""Many replicas as one server, and data sets over many nodes: what bit-exactness makes possible, on Ray.

`verispec.ray.app` is a Ray Serve application, `verispec.ray.map_prompts` a step of a Ray Data pipeline. Ray is imported
by `serving` and `data` alone; the rest knows asyncio and sockets, and is tested without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verispec.ray.data import map_prompts
    from verispec.ray.serving import app

__all__ = ["app", "map_prompts"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from verispec.ray.serving import app

        return app
    if name == "map_prompts":
        from verispec.ray.data import map_prompts

        return map_prompts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
