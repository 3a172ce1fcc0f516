"""The journal: what was accepted and what came of it, kept where it survives the processes that compute it."""
