# SPDX-License-Identifier: MIT
"""The model runner: carries out the scheduler's step plans on the device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from vtpu import artifacts, runtime
from vtpu.artifacts import Artifacts, ArtifactsError, StepShape
from vtpu.launch_block import LaunchBlock, fields_of
from vtpu.serving.step_plan import StepOutput, StepPlan

log = logging.getLogger("vtpu.runner")

# The cache that is made when nobody says how large: enough for 16 sequences of some
# 700 tokens of a 135M model. More would be zeroed at every start for nothing.
_DEFAULT_CACHE_BYTES = 256 << 20
# Left free in HBM for page tables, code and other clients.
_HBM_RESERVE = 32 << 20


class ModelRunner:
    """A model in HBM, its KV cache, and the program that runs steps of it.

    model_path: the GGUF file.
    aot_dir: folder of `vtpu.aot`; default: the environment's VTPU_AOT_DIR. Without
        one, or when it is another model's, the model is compiled now, into the cache.
    num_blocks: KV blocks, the null block included; default: what HBM has room for,
        within reason and within what max_num_seqs whole contexts need.
    backend: device name of the runtime ("core", "drm:/dev/accel/accel0").
    logits: keep the sampled rows' logits; see last_logits(). For tests.
    progress: told a line at each stage of starting.

    The attributes below are the scheduler's; see serving.step_plan.ModelRunner.
    Owned by one thread. A context manager; close() gives everything back.

    Raises GGUFError, CompileError, ArtifactsError or runtime.Error when the model, the
    device or its memory do not do.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        aot_dir: str | os.PathLike[str] | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 16,
        backend: str | None = None,
        logits: bool = False,
        progress: Callable[[str], None] = log.info,
    ) -> None:
        wanted = StepShape(max_seqs=max_num_seqs, block_size=block_size)
        with _artifacts(Path(model_path), aot_dir, wanted, progress) as made:
            self._device = runtime.Device.open(backend)
            try:
                self._start(made, num_blocks, max_num_seqs, logits, progress)
            except BaseException:
                self._device.close()
                raise

    def _start(
        self,
        made: Artifacts,
        num_blocks: int | None,
        max_num_seqs: int,
        logits: bool,
        progress: Callable[[str], None],
    ) -> None:
        device, shape = self._device, made.shape
        self._executable = device.load(made.executable)
        metadata = self._executable.metadata
        self._weights = _load_weights(device, made.weights, metadata)
        progress(f"weights are in HBM: {metadata['weights']['bytes']} bytes")

        self.block_size = shape.block_size
        self.max_tokens = shape.max_tokens
        self.max_rows_sampled = shape.max_seqs
        self.max_model_len = shape.context
        self.vocab_size = made.vocab_size
        slot_bytes = sum(int(state["slot_bytes"]) for state in metadata["states"])
        self.num_blocks = num_blocks or self._blocks_that_fit(slot_bytes, max_num_seqs, shape)
        num_slots = self.num_blocks * self.block_size
        most = min(int(state["max_slots"]) for state in metadata["states"])
        if not 2 * self.block_size <= num_slots <= most:
            raise ValueError(
                f"{self.num_blocks} KV blocks of {self.block_size} tokens; the least is 2 "
                f"blocks, the most {most} tokens"
            )
        self._cache = device.buffer(num_slots * slot_bytes, hbm=True, name="kv-cache")
        progress(f"KV cache: {self.num_blocks} blocks, {num_slots * slot_bytes} bytes")

        self._launch = device.buffer(int(metadata["launch"]["bytes"]), name="launch-block")
        block = LaunchBlock(self._launch.map(), fields_of(metadata), shape, num_slots)
        self._block = block
        self._logits = None
        if logits:
            self._logits = device.buffer(shape.max_seqs * self.vocab_size * 4, name="logits")
            block.set_logits(self._logits.va)
        self._queue = device.queue()
        places = {"weights": self._weights, "state": self._cache, "launch": self._launch}
        self._step = self._queue.prepare(self._executable, places)

    def _blocks_that_fit(self, slot_bytes: int, max_num_seqs: int, shape: StepShape) -> int:
        block_bytes = slot_bytes * shape.block_size
        memory = self._device.memory()
        free = max(memory.hbm_bytes - memory.hbm_used - _HBM_RESERVE, 0)
        fits = min(free, _DEFAULT_CACHE_BYTES) // block_bytes
        return int(max(min(fits, 1 + max_num_seqs * shape.max_blocks), 2))

    def execute(self, plan: StepPlan) -> StepOutput:
        """Runs one step to its end.

        Raises ValueError for a plan that the program cannot do, and runtime.Error,
        naming the model's operation, when the device faulted, hung or was reset. The
        next plan then finds a sound queue; weights and other requests' cache remain.
        """
        self._block.fill(plan)
        try:
            self._step.submit(plan.step_id & 0xFFFFFFFF).wait()
        except runtime.Error:
            self._queue.recover()
            raise
        return self._block.results(plan)

    def last_logits(self, rows: int) -> memoryview[float]:
        """Logits of the last step's first `rows` sampled rows: f32 [rows, vocab_size].

        A view that the next step overwrites. Needs logits=True.
        """
        assert self._logits is not None, "made without logits=True"
        nbytes = rows * self.vocab_size * 4
        return self._logits.map()[:nbytes].cast("f", (rows, self.vocab_size))

    def close(self) -> None:
        """Gives the device back. The runner is of no use afterwards."""
        self._device.close()

    def __enter__(self) -> ModelRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _artifacts(
    model: Path,
    aot_dir: str | os.PathLike[str] | None,
    wanted: StepShape,
    progress: Callable[[str], None],
) -> Iterator[Artifacts]:
    """The compiled model while it is loaded: the folder's if it fits, else made now."""
    folder = aot_dir or os.environ.get("VTPU_AOT_DIR")
    found = None
    if folder:
        try:
            found = artifacts.read_for(Path(folder), model, wanted)
        except ArtifactsError as error:
            progress(f"compiling the model now: {error}")
    if found is not None:
        yield found
        return
    from tempfile import TemporaryDirectory

    from vtpu.aot import build

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vtpu"
    name = f"aot-{artifacts.fingerprint(model)[:16]}-{wanted.max_seqs}-{wanted.block_size}"
    try:
        found = build(model, cache / name, wanted, progress)
    except OSError as error:
        progress(f"cannot keep the compiled model: {error}")
    if found is not None:
        yield found
        return
    with TemporaryDirectory(prefix="vtpu-aot-") as temporary:
        yield build(model, temporary, wanted, progress)


def _load_weights(device: runtime.Device, path: Path, metadata: dict[str, Any]) -> runtime.Buffer:
    nbytes = int(metadata["weights"]["bytes"])
    found = path.stat().st_size
    if found != nbytes:
        raise ArtifactsError(f"{path}: {found} bytes, the executable needs {nbytes}")
    buffer = device.buffer(nbytes, hbm=True, read_only=True, name="weights")
    with path.open("rb", buffering=0) as file:
        buffer.read_from(file.fileno(), nbytes)
    return buffer
