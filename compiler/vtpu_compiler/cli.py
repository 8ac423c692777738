# SPDX-License-Identifier: MIT
"""The commands `compile`, `objdump` and `coredump`; `python -m vtpu_compiler` has them too."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from .compile import STAGES, Options, compile_graph
from .coredump import CoredumpError, read_coredump, report
from .ir import CompileError
from .objdump import objdump
from .parser import parse_graph
from .reader import ExecutableError, read_elf


def add_commands(commands: Any) -> None:
    """Adds the commands to what ArgumentParser.add_subparsers() gave.

    Each sets `run`, a function from the parsed arguments to an exit status.
    """
    parser = commands.add_parser("objdump", help="disassemble an executable")
    parser.add_argument("file", type=Path)
    parser.add_argument("--section", metavar="NAME", help="print a text section instead")
    parser.set_defaults(run=_objdump)

    parser = commands.add_parser("coredump", help="explain a core dump of the device")
    parser.add_argument("file", type=Path, help="/sys/class/devcoredump/devcd*/data, or a copy")
    parser.add_argument(
        "executables",
        type=Path,
        nargs="*",
        help="executables or folders of them, among which to look for the program; "
        "default: the environment's VTPU_AOT_DIR",
    )
    parser.add_argument("--around", type=int, default=8, help="instructions to show (%(default)s)")
    parser.set_defaults(run=_coredump)

    parser = commands.add_parser("compile", help="compile a graph in text form")
    parser.add_argument("file", type=Path, help="a graph, or - for standard input")
    parser.add_argument("-o", "--output", type=Path, help="the executable to write")
    parser.add_argument(
        "--print-after",
        metavar="STAGE,...",
        type=_stages,
        default=(),
        help=f"print stages: all, or any of {', '.join(STAGES)}",
    )
    parser.add_argument(
        "--set",
        metavar="PASS.OPTION=VALUE",
        action="append",
        default=[],
        help="for example fuse.epilogue=false",
    )
    parser.set_defaults(run=_compile)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vtpu_compiler", description=__doc__)
    add_commands(parser.add_subparsers(required=True))
    parsed = parser.parse_args(arguments)
    try:
        status = parsed.run(parsed)
    except (CompileError, CoredumpError, ExecutableError) as error:
        print(f"{parsed.file}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    assert isinstance(status, int)
    return status


def _stages(text: str) -> tuple[str, ...]:
    names = STAGES if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in STAGES:
            raise argparse.ArgumentTypeError(f"there is no stage {name!r}")
    return names


def parse_options(settings: list[str]) -> Options:
    """Options from PASS.OPTION=VALUE; the option's type is its default's."""
    options = Options()
    for setting in settings:
        path, equals, text = setting.partition("=")
        name, dot, key = path.partition(".")
        target = getattr(options, name, None)
        if not (equals and dot and dataclasses.is_dataclass(target) and hasattr(target, key)):
            raise CompileError(f"--set {setting}: there is no such option")
        assert not isinstance(target, type)
        value: int
        if isinstance(getattr(target, key), bool):
            if text not in ("true", "false"):
                raise CompileError(f"--set {setting}: the value is true or false")
            value = text == "true"
        else:
            try:
                value = int(text, 0)
            except ValueError:
                raise CompileError(f"--set {setting}: the value is a number") from None
        change: dict[str, Any] = {name: dataclasses.replace(target, **{key: value})}
        options = dataclasses.replace(options, **change)
    return options


def _compile(arguments: argparse.Namespace) -> int:
    options = parse_options(arguments.set)
    source = sys.stdin.read() if str(arguments.file) == "-" else arguments.file.read_text()

    def record(name: str, text: str) -> None:
        if name in arguments.print_after:
            print(f"// ----- {name}\n{text}", end="")

    executable = compile_graph(parse_graph(source), options, record=record)
    if arguments.output is not None:
        arguments.output.write_bytes(executable.elf)
    elif not arguments.print_after:
        print("compiled; -o FILE writes the executable, --print-after=all shows every stage")
    return 0


def _objdump(arguments: argparse.Namespace) -> int:
    data = arguments.file.read_bytes()
    if arguments.section is None:
        print(objdump(data), end="")
        return 0
    sections = read_elf(data).sections
    if arguments.section not in sections:
        raise ExecutableError(
            f"there is no section {arguments.section}, but {', '.join(filter(None, sections))}"
        )
    print(sections[arguments.section].decode(errors="replace"), end="")
    return 0


def _coredump(arguments: argparse.Namespace) -> int:
    dump = read_coredump(arguments.file.read_text(errors="replace"))
    places = arguments.executables or [
        Path(place) for place in [os.environ.get("VTPU_AOT_DIR")] if place
    ]
    print(report(dump, places, arguments.around), end="")
    return 0
