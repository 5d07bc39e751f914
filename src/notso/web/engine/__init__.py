"""Engine integration: loading and unloading of models, request lifecycle, downloads and metrics."""
