"""Peers: the engines (llama.cpp and OpenVINO GenAI) that benchmarks compare with this one.

A peer runs in a separate process and stays loaded between measurements. Peers are not required to run or test this
project.
"""
