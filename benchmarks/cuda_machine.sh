#!/usr/bin/env bash
# What there is to know of a GPU machine, in the order in which it matters: does it compile, are the bits right, is it
# clean under the sanitizer, how fast is it. Right first: what fails ends the script.
#
#   benchmarks/cuda_machine.sh OUT [MODEL.gguf]
#
# OUT gets a file for each part; figures.json can be handed to benchmarks/report.py. Without a model a synthetic one in the
# shapes of SmolLM3-3B is made (2 GB). Needs nvcc, a GPU and this program installed from its source (make .venv/.run).
# With LLAMA_BENCH=path/to/llama-bench, llama.cpp's CUDA build is measured beside it, on the same file.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
model=${2:-$out/synthetic.gguf}
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

part() { printf '\n== %s\n' "$1"; }

part "machine"
nvidia-smi | tee "$out/machine.txt"
"$python" -m notso doctor | tee -a "$out/machine.txt"

part "bits of every kernel against the CPU"
"$python" benchmarks/cuda_bits.py --json "$out/bits.json"

part "sanitizer"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" benchmarks/cuda_bits.py --small > "$out/$tool.txt"
    tail -1 "$out/$tool.txt"
  done
else
  echo "compute-sanitizer is not here"
fi

part "whole answers against the CPU"
[ -e "$model" ] || "$python" -m notso synth "$model"
"$python" benchmarks/cuda_bits.py --model "$model" --json "$out/answers.json"

part "figures"
for device in cuda cpu; do
  "$python" -m notso bench "$model" --device "$device" --prefill 512 --prefill 2048 --depth 0 --depth 4096 --batch 1 --batch 16 \
    --decode 64 --repeat 5 --json > "$out/figures-$device.json"
done
if [ -n "${LLAMA_BENCH:-}" ]; then
  "$LLAMA_BENCH" -m "$model" -p 512,2048 -n 64 -ngl 99 -o json > "$out/llama-cpp.json"
fi
part "done: $out"
