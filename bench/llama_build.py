# SPDX-License-Identifier: MIT
"""Builds llama.cpp, the baseline, once for this host and caches it.

llama.cpp comes as the source distribution of llama-cpp-python from PyPI, built
with explicit instruction-set flags: its own detection would choose the AMX
path, which crashes on some machines.
"""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.3.36"


def cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vtpu"


def host_flags() -> set[str]:
    """CPU feature names as /proc/cpuinfo spells them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def cmake_arguments(flags: set[str]) -> list[str]:
    """Every option spelt out, so that the build depends on this list alone."""
    wanted = {
        "GGML_AVX": "avx" in flags,
        "GGML_AVX2": "avx2" in flags,
        "GGML_FMA": "fma" in flags,
        "GGML_F16C": "f16c" in flags,
        "GGML_BMI2": "bmi2" in flags,
        "GGML_AVX512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags,
        "GGML_AVX512_VBMI": "avx512vbmi" in flags,
        "GGML_AVX512_VNNI": "avx512_vnni" in flags,
        "GGML_AVX512_BF16": "avx512_bf16" in flags,
        "GGML_NATIVE": False,
        "GGML_AMX_TILE": False,
        "GGML_AMX_INT8": False,
        "GGML_AMX_BF16": False,
        "LLAMA_CURL": False,
        "LLAVA_BUILD": False,
    }
    return [f"-D{name}={'ON' if on else 'OFF'}" for name, on in wanted.items()]


def build() -> Path:
    """Returns the Python interpreter of an environment that can import llama_cpp."""
    arguments = cmake_arguments(host_flags())
    key = hashlib.sha256(" ".join([VERSION, sys.version, *arguments]).encode()).hexdigest()[:16]
    home = cache_root() / f"llama-cpp-{key}"
    python = home / "bin" / "python"
    done = home / "complete"
    if done.exists():
        return python
    log = cache_root() / f"llama-cpp-{key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"bench: building llama.cpp {VERSION} (several minutes, once; log: {log})", file=sys.stderr
    )
    venv.create(home, with_pip=True, clear=True)
    command = [
        str(python), "-m", "pip", "install", "--no-binary", "llama-cpp-python",
        f"llama-cpp-python=={VERSION}", "numpy",
    ]  # fmt: skip
    env = os.environ | {"CMAKE_ARGS": " ".join(arguments), "FORCE_CMAKE": "1"}
    with open(log, "w") as file:
        result = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        raise SystemExit(f"bench: building llama.cpp failed (exit {result.returncode}); log: {log}")
    done.touch()
    return python


if __name__ == "__main__":
    print(build())
