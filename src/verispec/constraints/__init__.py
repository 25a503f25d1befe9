"""Answers in a shape: what a schema, a regex or a grammar allows behind every token. Needs the extra `structured`."""

from verispec.constraints.compiler import Compiler, json_term, library_version

__all__ = ["Compiler", "json_term", "library_version"]
