# SPDX-License-Identifier: MIT
"""Runs in the guest: streams one completion and writes each token, with the bits of its
log-probability, to a file as it comes. Arguments: port, file, number of tokens."""

import http.client
import json
import sys

port, path, tokens = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
connection.request("GET", "/v1/models")
model = json.loads(connection.getresponse().read())["data"][0]["id"]
body = {
    "model": model,
    "prompt": "The history of the lighthouse begins",
    "max_tokens": tokens,
    "temperature": 0.8,
    "seed": 11,
    "logprobs": 1,
    "ignore_eos": True,
    "stream": True,
}
headers = {"Content-Type": "application/json"}
connection.request("POST", "/v1/completions", json.dumps(body), headers)
with open(path, "w", encoding="utf-8") as sink:
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        choice = json.loads(line[len(b"data: ") :])["choices"][0]
        logprobs = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
        for token, value in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True):
            print(json.dumps([token, value.hex()]), file=sink, flush=True)
    print("end", file=sink, flush=True)
