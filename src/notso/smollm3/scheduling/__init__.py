"""Which rows the next step computes and in which blocks: a state machine without arrays."""
