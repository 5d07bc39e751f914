"""Fine-tuning: training rows, LoRA training, and writing of the results."""

import os

# Must be set before transformers and TRL import huggingface_hub, which otherwise sends telemetry.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
