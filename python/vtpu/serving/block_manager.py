# SPDX-License-Identifier: MIT
"""Physical KV blocks: who holds which.

Each operation either succeeds whole or changes nothing. All calls come from the
engine thread.
"""

from __future__ import annotations

from collections import deque

from vtpu.serving.request import Request
from vtpu.serving.step_plan import NULL_BLOCK


class BlockManager:
    """Hands out fixed-size blocks from a free list.

    The free list is a queue: blocks come from its head and return to its tail,
    last block of a sequence first. Without prefix caching the order is only a
    convention; with it, it is the eviction order (tails go before shared heads).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, the least is 2")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, the least is 1")
        self.block_size = block_size
        self.num_usable_blocks = num_blocks - 1
        self._free = deque(b for b in range(num_blocks) if b != NULL_BLOCK)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use, 0..1."""
        return 1.0 - len(self._free) / self.num_usable_blocks

    @property
    def capacity_tokens(self) -> int:
        """Most tokens that a single request can ever hold."""
        return self.num_usable_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, request: Request) -> bool:
        return self.blocks_for(request.num_tokens) <= len(self._free)

    def allocate(self, request: Request) -> None:
        """Give a request that holds no block enough for all tokens it has now.

        The whole prompt is reserved at once, though it may be computed in chunks,
        so that a half-done prefill is never the victim of another one.
        """
        assert not request.block_table, f"{request.request_id} already holds blocks"
        count = self.blocks_for(request.num_tokens)
        if count > len(self._free):
            raise RuntimeError("allocate() without can_allocate()")
        free = self._free
        request.block_table = [free.popleft() for _ in range(count)]

    def can_append(self, request: Request) -> bool:
        """Whether the blocks for the request's newest token are there."""
        missing = self.blocks_for(request.num_tokens) - len(request.block_table)
        return missing <= len(self._free)

    def may_append(self, request: Request) -> None:
        """Add a block if the newest token starts one."""
        missing = self.blocks_for(request.num_tokens) - len(request.block_table)
        if missing > len(self._free):
            raise RuntimeError("may_append() without can_append()")
        for _ in range(missing):
            request.block_table.append(self._free.popleft())

    def free(self, request: Request) -> None:
        """Take all blocks back. Calling it again does nothing."""
        self._free.extend(reversed(request.block_table))
        request.block_table = []

    def check_idle(self) -> None:
        """Raise RuntimeError unless every block is free exactly once."""
        free = set(self._free)
        if len(self._free) != self.num_usable_blocks or len(free) != len(self._free):
            raise RuntimeError(
                f"KV block leak: {len(free)} distinct blocks in a free list of "
                f"{len(self._free)}, expected {self.num_usable_blocks}"
            )
