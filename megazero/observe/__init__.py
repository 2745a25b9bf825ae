"""What a run says about itself: rows of metrics, the sinks they go to, the loss curve, a profile on demand."""
