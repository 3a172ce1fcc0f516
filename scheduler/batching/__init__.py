"""Batch formation: which waiting requests are prefilled together, and when. Pure: time is an argument."""
