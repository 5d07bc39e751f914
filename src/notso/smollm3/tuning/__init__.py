"""Fine-tuning: training rows, LoRA training, and writing of the results."""
