"""Buckets, static buffers and graph replay. Knows no model, and imports nothing of the other packages."""
