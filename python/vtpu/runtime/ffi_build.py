# SPDX-License-Identifier: MIT
"""Builds the extension module `_tpurt` from tpurt.h, for the Python that runs this.

    python3 python/vtpu/runtime/ffi_build.py OUT [--lib-dir DIR] [--header FILE] [--rpath PATH]

Needs cffi, a C compiler ($CC, else cc) and the Python's headers; no setuptools. The
declarations are taken from the header as it is, so nothing is written twice. The
result, OUT/_tpurt.<tag>.so, is found in the folder of this file or on the Python path.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path

_DEFINE = re.compile(r"^#define\s+(TPURT_\w+)\s+[0-9x]\w*\b")


def declarations(header: str) -> str:
    """What cffi shall know of a header: its C, its numbers, no preprocessing."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    lines = []
    cpp_only = False
    for line in text.splitlines():
        if line.startswith("#ifdef __cplusplus"):
            cpp_only = True
        elif line.startswith("#endif"):
            cpp_only = False
        elif constant := _DEFINE.match(line):
            lines.append(f"#define {constant[1]} ...")
        elif not cpp_only and not line.startswith("#"):
            lines.append(line.replace("TPURT_API ", ""))
    return "\n".join(lines)


def build(header: Path, lib_dir: Path, out: Path, rpath: str) -> Path:
    """Generates and compiles the module; returns its path."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(declarations(header.read_text("utf-8")))
    ffi.set_source("_tpurt", f"#include <{header.name}>")
    out.mkdir(parents=True, exist_ok=True)
    module = out / f"_tpurt{sysconfig.get_config_var('EXT_SUFFIX')}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "_tpurt.c"
        ffi.emit_c_code(str(source))
        command = [
            *shlex.split(os.environ.get("CC", "cc")), "-O2", "-fPIC", "-shared",
            f"-I{sysconfig.get_path('include')}", f"-I{header.parent}",
            "-o", str(module), str(source), f"-L{lib_dir}", "-ltpurt", f"-Wl,-rpath,{rpath}",
        ]  # fmt: skip
        subprocess.run(command, check=True)
    return module


def main() -> None:
    root = Path(__file__).resolve().parents[3]
    parser = argparse.ArgumentParser(description="Builds the extension module _tpurt.")
    parser.add_argument("out", type=Path, help="folder for the module")
    parser.add_argument("--header", type=Path, default=root / "libtpurt/include/tpurt.h")
    parser.add_argument(
        "--lib-dir",
        type=Path,
        default=os.environ.get("VTPU_LIBRARY_DIR"),
        help="folder of libtpurt.so; default: $VTPU_LIBRARY_DIR, else OUT",
    )
    parser.add_argument(
        "--rpath", help="where the module finds libtpurt.so.1; default: DIR as seen from OUT"
    )
    args = parser.parse_args()
    lib_dir = Path(args.lib_dir or args.out)
    # Relative, so that both folders can move together.
    rpath = args.rpath or f"$ORIGIN/{os.path.relpath(lib_dir, args.out)}"
    print(build(args.header, lib_dir, args.out, rpath))


if __name__ == "__main__":
    main()
