"""What is observed of a service: figures for Prometheus and Ray, traces, and the lines of the log."""
