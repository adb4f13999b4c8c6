"""Decoding with a drafter: the target's own output, with `n` tokens of one sequence in flight.

Imports neither lightning nor datasets.
"""
