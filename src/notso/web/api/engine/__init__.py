"""The engine for other servers of ours: front ends that keep and show, and compute nothing. Not for anybody else."""
