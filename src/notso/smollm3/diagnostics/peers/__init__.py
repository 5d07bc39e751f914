"""Comparison engines, llama.cpp and OpenVINO GenAI, where installed.

A peer runs in a separate process under any Python that has it, and stays loaded between measurements. It is never
needed to run or test this project.
"""

from notso.smollm3.diagnostics.peers.process import MODEL_VARIABLE, PEERS, PYTHON_VARIABLE, PeerProcess, Task

__all__ = ["MODEL_VARIABLE", "PEERS", "PYTHON_VARIABLE", "PeerProcess", "Task"]
