"""The front of purefill: queue, batch formation, leases, HTTP API and command line. Never imports torch."""
