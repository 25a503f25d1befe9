"""Tuning layer skipping: what parts of a pass cost, which sub-layers to skip, and what that is predicted to gain."""

from verispec.tuning.tuner import QUICK, Search, Subject, TuneOptions, quick_menu, tune

__all__ = ["QUICK", "Search", "Subject", "TuneOptions", "quick_menu", "tune"]
