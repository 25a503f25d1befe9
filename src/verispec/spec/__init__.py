"""Speculation: drafters, plans and the verifier."""
