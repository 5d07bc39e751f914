"""Peers: the engines that benchmarks compare with this one, llama.cpp and OpenVINO GenAI.

A peer runs in a separate process, under any Python interpreter in which it is installed, and stays loaded between
measurements. Peers are not required to run or test this project.
"""

from notso.smollm3.diagnostics.peers.process import PeerProcess, Task

__all__ = ["PeerProcess", "Task"]
