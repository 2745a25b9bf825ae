"""Report on a run: rows of metrics, the sinks they go to, the loss curve, a profile on demand."""
