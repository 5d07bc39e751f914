"""Fine-tuning: training rows, LoRA training with TRL and PEFT, and writing of the results."""
