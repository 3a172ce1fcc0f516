"""`purefill top`: what the service does right now, computed from two scrapes of its `/metrics`."""
