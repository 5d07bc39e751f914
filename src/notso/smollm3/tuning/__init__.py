"""Fine-tune models: prepare training rows, train LoRA adapters, and write the results."""

import os

# This must be set before transformers and TRL import huggingface_hub, which would otherwise send telemetry.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
