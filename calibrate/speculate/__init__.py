"""Speculative decoding that really runs: drafters, the loop of rounds, and what they took.

`text` holds what is committed, `drafters` propose, `loop` verifies with `specmodel.law`.
"""
