# SPDX-License-Identifier: MIT
"""The command line: `python3 -m vtpu COMMAND ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

# Command -> what it does, the module whose main() does it, and that one's own first
# arguments. A module is imported only when it is asked for.
_COMMANDS = {
    "serve": ("OpenAI-compatible server", "vtpu.server", []),
    "generate": ("continue a prompt, without a server", "vtpu.llm", []),
    "compile": ("compile a GGUF model ahead of time", "vtpu.aot", []),
    "objdump": ("disassemble an executable", "vtpu_compiler.cli", ["objdump"]),
    "coredump": ("explain a core dump of the device", "vtpu_compiler.cli", ["coredump"]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command with the rest of the arguments; returns its exit code."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    if command not in _COMMANDS:
        stream = sys.stdout if command in ("-h", "--help") else sys.stderr
        print("usage: vtpu COMMAND ...\n", file=stream)
        for name, (summary, *_) in _COMMANDS.items():
            print(f"  {name:<10}{summary}", file=stream)
        return 0 if stream is sys.stdout else 2
    _, module, first = _COMMANDS[command]
    if find_spec(module) is None:
        print(f"vtpu: {command}: the module {module} is not installed", file=sys.stderr)
        return 1
    return int(import_module(module).main([*first, *rest[:-1]]) or 0)


if __name__ == "__main__":
    sys.exit(main())
