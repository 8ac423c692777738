# SPDX-License-Identifier: MIT
"""The commands behind the Makefile."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import os
import shutil
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from . import accel, chat, checks, debug, develop, driver, fuzz, fuzz_driver, lint
from .build import build
from .cache import build_lock, cache_dir, remove
from .guest import Guest
from .link import GuestError
from .machine import GUEST_HTTP_PORT, Machine
from .model import fetch
from .stage import Stage, StageError
from .venv import install_host_packages, venv_environment, venv_python

DEFAULT_PROMPT = "Explain in two sentences what a tensor processing unit does."
_SPARE_MEMORY_MB = 1024
_PR_SET_PDEATHSIG = 1


def _model_file(arguments: argparse.Namespace) -> Path | None:
    if not arguments.model:
        return None
    model = Path(arguments.model).resolve()
    if model.is_dir():
        raise StageError(f"the model {model} is a folder; a GGUF file is needed")
    if not model.is_file():
        raise StageError(f"there is no model file {model}")
    with model.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise StageError(f"{model} is not a GGUF file")
    return model


def _machine(arguments: argparse.Namespace) -> Machine:
    # What can be refused is refused before the minutes of a first build.
    model = _model_file(arguments)
    accelerator = accel.choose()
    checks.need_memory(Machine.memory_mb + _SPARE_MEMORY_MB)
    images = build(model)
    print(f"vtpu: accelerator {accelerator.name} ({accelerator.reason})", file=sys.stderr)
    return Machine(images=images, accelerator=accelerator)


def build_only(arguments: argparse.Namespace) -> int:
    """Build all images without booting."""
    build(_model_file(arguments))
    return 0


def _server(arguments: argparse.Namespace) -> list[str]:
    model = f"/opt/model/{(_model_file(arguments) or fetch()).name}"
    words = ["python3", "-m", "vtpu.server", "--model", model]
    return [*words, "--host", "0.0.0.0", "--port", str(GUEST_HTTP_PORT)]


def _wait_healthy(guest: Guest, port: int, timeout: float = 300) -> None:
    with Stage("boot and load the model") as stage:
        while not chat.is_healthy(port):
            guest.check_running()
            if stage.elapsed > timeout:
                raise StageError(f"the server was not ready in {timeout:g} s", guest.console_log)
            lines = guest.console().splitlines()
            said = [line.removeprefix("vtpu-init: ") for line in lines if "vtpu-init" in line]
            stage.progress(said[-1] if said else "kernel")
            # Each look is a connection that the emulated server has to answer.
            time.sleep(0.2)


def _start_server(guest: Guest, port: int) -> None:
    guest.start(wait=False)
    try:
        _wait_healthy(guest, port)
        guest.wait_agent(10)
    except GuestError as error:
        tail = ""
        if error.log and error.log.is_file():
            tail = "".join(error.log.read_text(errors="replace").splitlines(keepends=True)[-15:])
        raise StageError(f"{error.reason}\n{tail}".rstrip(), error.log) from None


def run(arguments: argparse.Namespace) -> int:
    """One answer on stdout."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale that cannot write the answer
    if arguments.max_tokens < 1:
        raise StageError(f"MAX_TOKENS is {arguments.max_tokens}; it must be at least 1")
    machine = _machine(arguments)
    port = checks.free_port()
    guest = Guest(machine, forward={port: GUEST_HTTP_PORT}, start=_server(arguments))
    try:
        _start_server(guest, port)
        try:
            for piece in chat.stream_chat(port, arguments.prompt, arguments.max_tokens):
                sys.stdout.write(piece)
                sys.stdout.flush()
        except chat.ApiError as error:
            raise StageError(f"chat completion: {error}", guest.console_log) from None
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
        with Stage("shut down"):
            guest.shutdown()
    finally:
        guest.kill()
    return 0


def serve(arguments: argparse.Namespace) -> int:
    """The API on 127.0.0.1 until Ctrl-C."""
    checks.need_port(arguments.port)
    machine = _machine(arguments)
    checks.need_port(arguments.port)
    forward = {arguments.port: GUEST_HTTP_PORT}
    guest = Guest(machine, forward=forward, start=_server(arguments))
    try:
        _start_server(guest, arguments.port)
        print(
            f"vtpu: serving on http://127.0.0.1:{arguments.port}/v1, Ctrl-C ends it",
            file=sys.stderr,
        )
        while True:
            guest.check_running()
            time.sleep(0.2)
    except KeyboardInterrupt:
        with Stage("shut down"):
            guest.shutdown()
        return 0
    finally:
        guest.kill()


def shell(arguments: argparse.Namespace) -> int:
    """A root shell in the guest on this terminal."""
    machine = _machine(arguments)
    print("vtpu: 'exit' or Ctrl-D powers the guest off", file=sys.stderr)
    # A serial line does not carry the size of the window.
    size = shutil.get_terminal_size()
    start = ["sh", "-c", f"stty cols {size.columns} rows {size.lines}; exec bash -l"]
    guest = Guest(machine, start=start, terminal=True)
    with _kept_terminal():
        try:
            guest.start(wait=False)
            return guest.wait_exit()
        finally:
            guest.kill()


@contextlib.contextmanager
def _kept_terminal() -> Iterator[None]:
    """QEMU makes the terminal raw; when it is killed, it cannot undo that."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def develop_driver(arguments: argparse.Namespace) -> int:
    """Puts the driver into the running guest, now and after each save."""
    source = Path(arguments.source).resolve()
    if source not in (driver.SOURCE, driver.EXAMPLE):
        raise StageError(f"SOURCE is {arguments.source}; it must be kmod or kmod/example")
    return develop.develop(lambda: _machine(arguments), source, arguments.test, arguments.once)


def debug_guest(arguments: argparse.Namespace) -> int:
    """gdb on the running guest's kernel and driver, or on its QEMU."""
    with develop.running_or_booted(lambda: _machine(arguments)) as folder, _kept_terminal():
        return debug.debug(folder, arguments.what, arguments.commands)


def execute(arguments: argparse.Namespace) -> int:
    """One command in a fresh guest, with its output and status."""
    machine = _machine(arguments)
    with Stage("boot"):
        guest = Guest(machine)
        guest.start()
    try:
        done = guest.run(arguments.command, timeout=arguments.timeout)
        sys.stdout.buffer.write(done.stdout)
        sys.stdout.flush()
        sys.stderr.buffer.write(done.stderr)
        guest.shutdown()
        return done.returncode
    finally:
        guest.kill()


def python(arguments: argparse.Namespace) -> int:
    """The host's Python environment, made when missing: python -- -m pytest."""
    with build_lock():
        install_host_packages()
        interpreter = venv_python()
    words = arguments.arguments
    if words[:1] == ["--"]:  # some versions of argparse keep it
        words = words[1:]
    os.execve(interpreter[0], [*interpreter, *words], venv_environment())


def fuzz_device(arguments: argparse.Namespace) -> int:
    """Looks for inputs that break the device, or runs one again."""
    if arguments.replay:
        path = Path(arguments.replay).resolve()
        if not path.is_file():
            raise StageError(f"there is no input {path}")
        return fuzz.replay(path)
    if arguments.seconds < 1:
        raise StageError(f"SECONDS is {arguments.seconds}; it must be at least 1")
    return fuzz.fuzz_all(arguments.seconds)


def fuzz_the_driver(arguments: argparse.Namespace) -> int:
    """Looks for calls that break the driver, or makes some again."""
    if arguments.replay:
        return fuzz_driver.replay(Path(arguments.replay).resolve())
    if arguments.seconds < 1:
        raise StageError(f"SECONDS is {arguments.seconds}; it must be at least 1")
    return fuzz_driver.fuzz(arguments.seconds, time.time_ns())


def lint_the_driver(_arguments: argparse.Namespace) -> int:
    """Checks the driver's source with checkpatch, sparse and coccinelle."""
    with build_lock():
        lint.lint_driver()
    return 0


def clean(_arguments: argparse.Namespace) -> int:
    """Removes all that was built and downloaded."""
    with build_lock(), Stage("clean"):
        for path in cache_dir().iterdir():
            if path.name != "lock":
                remove(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vtpu_guest", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)

    def add(name: str, action: object, help_text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text)
        command.set_defaults(action=action)
        return command

    def with_model(command: argparse.ArgumentParser) -> None:
        command.add_argument("--model", help="a GGUF file instead of the default model")

    with_model(add("build", build_only, build_only.__doc__ or ""))
    command = add("run", run, run.__doc__ or "")
    with_model(command)
    command.add_argument("--prompt", default=DEFAULT_PROMPT)
    command.add_argument("--max-tokens", type=int, default=96)
    command = add("serve", serve, serve.__doc__ or "")
    with_model(command)
    command.add_argument("--port", type=int, default=8000)
    with_model(add("shell", shell, shell.__doc__ or ""))
    command = add("exec", execute, execute.__doc__ or "")
    with_model(command)
    command.add_argument("--timeout", type=float, default=600)
    command.add_argument("command", nargs="+")
    command = add("fuzz", fuzz_device, fuzz_device.__doc__ or "")
    command.add_argument("--seconds", type=int, default=60)
    command.add_argument("--replay", default="")
    command = add("fuzz-driver", fuzz_the_driver, fuzz_the_driver.__doc__ or "")
    command.add_argument("--seconds", type=int, default=60)
    command.add_argument("--replay", default="")
    command = add("kmod-dev", develop_driver, develop_driver.__doc__ or "")
    with_model(command)
    command.add_argument("--source", default=str(driver.SOURCE), help="kmod or kmod/example")
    command.add_argument("--test", default="", help="for pytest, after each exchange")
    command.add_argument("--once", action="store_true", help="exchange once and end")
    command = add("debug", debug_guest, debug_guest.__doc__ or "")
    with_model(command)
    command.add_argument("--commands", default="", help="for gdb, instead of the terminal")
    command.add_argument("what", choices=["kernel", "qemu"])
    command = add("python", python, python.__doc__ or "")
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    add("lint-driver", lint_the_driver, lint_the_driver.__doc__ or "")
    add("clean", clean, clean.__doc__ or "")
    return parser


def _terminated(_number: int, _frame: FrameType | None) -> None:
    # Unwinds like Ctrl-C, so that everything started is ended; the status says
    # which signal it was.
    raise SystemExit(128 + signal.SIGTERM)


def _end_with_make() -> None:
    """Makes the death of make, even by SIGKILL, end this process in order."""
    if "MAKELEVEL" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _drop_output() -> None:
    """What could not be written must not be tried again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> int:
    # Also when a script started this in the background, where the shell has
    # SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGHUP, _terminated)
    _end_with_make()
    arguments = _parser().parse_args()
    try:
        code: int = arguments.action(arguments)
        return code
    except KeyboardInterrupt:
        print("\nvtpu: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE  # who read the output has read enough
    except (StageError, GuestError, ValueError, OSError) as error:
        if not getattr(error, "shown", False):
            print(f"vtpu: {error}", file=sys.stderr)
        if isinstance(error, OSError):
            _drop_output()
        return 1


if __name__ == "__main__":
    sys.exit(main())
