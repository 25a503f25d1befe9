"""Batches that can be killed: many requests from a file, answered into a file, with a journal of how far they came.

`prompts` are lines with a prompt and the objects that answer them, `journal` keeps what is finished or under way.
"""
