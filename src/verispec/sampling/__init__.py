"""Sampling: noise, logit processing, the draw and the acceptance rule. Pure functions over arrays."""
