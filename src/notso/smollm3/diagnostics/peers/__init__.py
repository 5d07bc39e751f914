"""Other engines, measured in turns with ours: llama.cpp and OpenVINO GenAI, where somebody has installed them.

A peer runs in a process of its own, under whatever Python has it, and stays loaded between measurements. It is never
needed to run or test this project.
"""

from notso.smollm3.diagnostics.peers.process import MODEL_VARIABLE, PEERS, PYTHON_VARIABLE, PeerProcess, Task

__all__ = ["MODEL_VARIABLE", "PEERS", "PYTHON_VARIABLE", "PeerProcess", "Task"]
