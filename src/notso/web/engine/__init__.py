"""Engine integration: hosting, models, quotas and metrics."""
