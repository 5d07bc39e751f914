"""Peers: other engines to compare with, llama.cpp and OpenVINO GenAI, if installed.

A peer runs in a separate process, under any Python interpreter that has it, and stays loaded between measurements. It
is not required to run or test this project.
"""

from notso.smollm3.diagnostics.peers.process import MODEL_VARIABLE, PEERS, PYTHON_VARIABLE, PeerProcess, Task

__all__ = ["MODEL_VARIABLE", "PEERS", "PYTHON_VARIABLE", "PeerProcess", "Task"]
