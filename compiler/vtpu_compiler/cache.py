# SPDX-License-Identifier: MIT
"""Compiled executables on disk, named by all that they depend on."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .compile import Executable, Options, cache_key, compile_graph
from .ir import Graph
from .printer import format_graph
from .reader import ExecutableError, read_elf


@dataclass(frozen=True, slots=True)
class Cache:
    """A directory that any number of processes may use at once.

    limit: executables kept; the least recently used ones go first.
    """

    directory: Path
    limit: int = 64

    def compile(self, graph: Graph, options: Options | None = None) -> Executable:
        """The executable of a graph; one from the cache has no stages."""
        options = options or Options()
        path = self.directory / f"{cache_key(format_graph(graph), options).hex()}.elf"
        found = self._load(path)
        if found is not None:
            return found
        executable = compile_graph(graph, options)
        self._store(path, executable.elf)
        return executable

    def _load(self, path: Path) -> Executable | None:
        try:
            data = path.read_bytes()
            elf = read_elf(data)
        except OSError:
            return None
        except ExecutableError:
            return None  # damaged: it is compiled again and replaced
        if elf.key.hex() != path.stem:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return Executable(data, elf.metadata, elf.key)

    def _store(self, path: Path, data: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)  # readers see all of it or none
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._prune()

    def _prune(self) -> None:
        files = []
        for path in self.directory.glob("*.elf"):
            with contextlib.suppress(OSError):
                files.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(files)[: max(0, len(files) - self.limit)]:
            path.unlink(missing_ok=True)
