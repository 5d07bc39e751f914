#!/usr/bin/env bash
# Test and benchmark a machine with a GPU: compare bits with the CPU, measure speed, and run NVIDIA's sanitizer.
#
#   benchmarks/cuda_machine.sh OUT [MODEL.gguf]
#
# Each part writes a file to the folder OUT; benchmarks/report.py reads figures-*.json. If a part fails or exceeds its
# time limit, the other parts still run, and the exit code is 1. Without a model, a synthetic one with SmolLM3-3B's
# shapes is created (2 GB). Requires a GPU and a build with GPU code (run `make .venv/.run` on a machine with nvcc).
# PYTHON is the interpreter (default: .venv/bin/python). With LLAMA_BENCH=path/to/llama-bench, llama.cpp is measured
# with the same model file, on the GPU and on the CPU.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
model=${2:-$out/synthetic.gguf}
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-.venv/bin/python}
failed=()

# part NAME SECONDS FILE COMMAND...: run a part with a time limit. Its output is written to FILE, and the output's end
# is printed.
part() {
  local name=$1 seconds=$2 file=$3 begun=$SECONDS
  shift 3
  printf '\n== %s\n' "$name"
  timeout "$seconds" "$@" 2>"$out/$file.errors" | tee "$out/$file" | tail -c 3000
  local code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || { failed+=("$name"); tail -5 "$out/$file.errors"; }
  echo "   $((SECONDS - begun)) s, exit code $code"
}

part "machine" 30 machine.txt nvidia-smi
part "doctor" 60 doctor.txt "$python" -m notso doctor
[ -e "$model" ] || part "synthetic model" 120 synth.txt "$python" -m notso synth "$model"
part "bits of every kernel against the CPU" 180 bits.json "$python" benchmarks/cuda_bits.py
part "whole answers against the CPU" 180 answers.json "$python" benchmarks/cuda_bits.py --model "$model"
shape=(--prefill 512 --prefill 2048 --depth 0 --depth 4096 --batch 16 --decode 64 --json)
part "figures, GPU" 180 figures-cuda.json "$python" -m notso bench "$model" --device cuda "${shape[@]}" --repeat 5
for threads in 1 2 4 8 16; do
  [ "$threads" -gt "$(nproc)" ] || part "figures, CPU, $threads threads" 120 "figures-cpu-$threads.json" \
    "$python" -m notso bench "$model" --device cpu --threads "$threads" --prefill 256 --batch 0 --json
done
if [ -n "${LLAMA_BENCH:-}" ]; then
  part "llama.cpp, GPU" 120 llama-cpp-cuda.json "$LLAMA_BENCH" -m "$model" -p 512,2048 -n 64 -ngl 99 -o json
  part "llama.cpp, CPU" 180 llama-cpp-cpu.json "$LLAMA_BENCH" -m "$model" -p 256 -n 32 -r 3 -ngl 0 -dev none -t 1,2,4,8,16 -o json
fi
for tool in memcheck racecheck initcheck synccheck; do
  ! command -v compute-sanitizer >/dev/null || part "sanitizer: $tool" 300 "$tool.txt" \
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" benchmarks/cuda_bits.py --small
done
printf '\n== done: %s; failed: %s\n' "$out" "${failed[*]:-nothing}"
[ ${#failed[@]} = 0 ]
