"""Measure how many answers end within a limit with llama.cpp's grammars for the schemas that schemas.py draws.

    PYTHON benchmarks/schemas_llama_cpp.py --bench jsonschemabench/data --gguf demo.gguf --seed 17

Run it with a Python that has `llama_cpp` and `numpy`; it imports nothing from notso. As in schemas.py, tokens are drawn
uniformly from the allowed ones. Prints a table row for each data set: schemas, grammars created, answers that ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

LIMIT, ANSWERS = 400, 3


class Vocabulary:
    """The tokens of a model file."""

    def __init__(self, path: Path) -> None:
        self._model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        self.vocab = llama_cpp.llama_model_get_vocab(self._model.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        ids = range(self.size)
        self.ends = {token for token in ids if llama_cpp.llama_vocab_is_eog(self.vocab, token)}


def ends(grammar: str, vocabulary: Vocabulary, chance: np.random.Generator) -> bool:
    """Return whether an answer of uniformly drawn tokens ends within the limit. Raises ValueError if parsing fails."""
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary.vocab, grammar.encode(), b"root")
    if not sampler:
        raise ValueError("the grammar was not parsed")
    try:
        data = (llama_cpp.llama_token_data * vocabulary.size)()
        values = np.ctypeslib.as_array(data)
        for _ in range(LIMIT):
            values["id"], values["logit"] = np.arange(vocabulary.size), chance.random(vocabulary.size)
            among = llama_cpp.llama_token_data_array(data=data, size=vocabulary.size, selected=-1, sorted=False)
            llama_cpp.llama_sampler_apply(sampler, llama_cpp.ctypes.byref(among))
            best = int(values["logit"].argmax())
            token = int(values["id"][best])
            if not np.isfinite(values["logit"][best]):
                return False  # the grammar allows no token
            if token in vocabulary.ends:
                return True
            llama_cpp.llama_sampler_accept(sampler, token)
        return False
    finally:
        llama_cpp.llama_sampler_free(sampler)


def ended_of(schema: Any, vocabulary: Vocabulary, seed: int) -> int | str:
    """Return the number of answers that ended, or an error. Runs in a separate process, which some grammars crash."""
    ours, theirs = multiprocessing.Pipe()

    def work() -> None:
        chance = np.random.default_rng(seed)
        try:
            grammar = llama_cpp.llama_grammar.json_schema_to_gbnf(json.dumps(schema))
            theirs.send(sum(ends(grammar, vocabulary, chance) for _ in range(ANSWERS)))
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {str(error)[:100]}")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    theirs.close()
    try:
        found: int | str = ours.recv()
        return found
    except EOFError:
        return "the process crashed"
    finally:
        process.join()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    vocabulary = Vocabulary(arguments.gguf)
    draw = random.Random(arguments.seed)
    folders = sorted(path for path in arguments.bench.iterdir() if path.is_dir())
    total = np.zeros(3, int)
    for folder in folders:
        paths = sorted(folder.glob("*.json"))
        counts = np.zeros(3, int)
        for path in draw.sample(paths, min(len(paths), arguments.sample // len(folders))):
            schema: Any = json.loads(path.read_text())
            counts[0] += 1
            ended = ended_of(schema, vocabulary, arguments.seed)
            if isinstance(ended, str):
                print(f"refused: {folder.name}: {path.name}: {ended}", flush=True)
                continue
            counts[1:] += 1, ended
        total += counts
        print(f"| {folder.name} | {counts[0]} | {counts[1]} | {counts[2]} of {ANSWERS * counts[1]} |", flush=True)
    print(f"| all | {total[0]} | {total[1]} | {total[2]} of {ANSWERS * total[1]} |")


if __name__ == "__main__":
    main()
