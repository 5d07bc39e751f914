"""Fine-tuning: training rows, LoRA training by TRL and PEFT, and the resulting files."""
