# SPDX-License-Identifier: MIT
"""Times llama.cpp natively on the workloads that the guest is timed on.

Runs inside the environment of llama_build.py: `llama_baseline.py MODEL [--repeat N]`.
Prints one JSON object of lists, one entry a repetition: decode_b1 and decode_b8
(tokens/s), ttft_512 (seconds).
"""

import argparse
import ctypes
import json
import os
import time

import llama_cpp
import numpy as np

PROMPT_TOKENS = 16
DECODE_TOKENS = 96


class Session:
    """One context of the model with room for `sequences` of `length` tokens."""

    def __init__(self, model: object, sequences: int, length: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * length
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama_init_from_model failed")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(512, 0, sequences)

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Computes (token, position, sequence, wants logits) entries."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = int(wanted)
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")

    def best(self, row: int) -> int:
        """The greedy token of batch entry `row`."""
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self.vocab_size,)).argmax())

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)


def prompt(sequence: int, length: int) -> list[int]:
    """Arbitrary ordinary tokens, different for each sequence."""
    return [1000 + (sequence * 7919 + i * 104729) % 40000 for i in range(length)]


def time_decode(model: object, sequences: int, threads: int) -> float:
    session = Session(model, sequences, PROMPT_TOKENS + DECODE_TOKENS + 8, threads)
    tokens = []
    for s in range(sequences):
        ids = prompt(s, PROMPT_TOKENS)
        session.decode([(t, i, s, i == len(ids) - 1) for i, t in enumerate(ids)])
        tokens.append(session.best(len(ids) - 1))
    start = time.perf_counter()
    for step in range(DECODE_TOKENS):
        session.decode([(t, PROMPT_TOKENS + step, s, True) for s, t in enumerate(tokens)])
        tokens = [session.best(s) for s in range(sequences)]
    elapsed = time.perf_counter() - start
    session.close()
    return sequences * DECODE_TOKENS / elapsed


def time_first_token(model: object, threads: int) -> float:
    session = Session(model, 1, 600, threads)
    session.decode([(1, 0, 0, True)])  # warm-up of the thread pool and buffers
    memory = llama_cpp.llama_get_memory(session.context)
    llama_cpp.llama_memory_clear(memory, True)
    ids = prompt(0, 512)
    start = time.perf_counter()
    session.decode([(t, i, 0, i == 511) for i, t in enumerate(ids)])
    session.best(511)
    elapsed = time.perf_counter() - start
    session.close()
    return elapsed


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: object) -> None:
    """llama.cpp's own log is not wanted on stdout or stderr."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        args.model.encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp cannot load {args.model}")
    result: dict[str, list[float]] = {"decode_b1": [], "decode_b8": [], "ttft_512": []}
    for _ in range(args.repeat):
        result["decode_b1"].append(time_decode(model, 1, args.threads))
        result["decode_b8"].append(time_decode(model, 8, args.threads))
        result["ttft_512"].append(time_first_token(model, args.threads))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
