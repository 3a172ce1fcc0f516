"""Fleets in virtual time: the scheduler's own core, between workers that take what a cost model says."""
