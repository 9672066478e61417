"""The host pool of an engine: made by rank 0, joined by the others, found by the scheduler.

Ranks in processes share one pool in shared memory, or in a file that outlives the engine; a single
rank without such a file has memory of its own, in the process of its scheduler.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

import kvpolicy
from kvpolicy_vllm.errors import VLLMConfigError
from kvpolicy_vllm.ranks import on_all_ranks

ROW_ALIGNMENT = 64
_SHARED = Path("/dev/shm")
_KEPT_MAX_RANKS = 256  # the same for every grid that may ever open the file
_opened: weakref.WeakValueDictionary[str, kvpolicy.HostPool] = weakref.WeakValueDictionary()
"""Pools that this process has opened, by engine: a rank may live in its scheduler's process."""


@attrs.frozen(kw_only=True)
class PoolWish:
    """What the configuration says of the pool; the same on every rank and in the scheduler.

    Attributes:
        engine: vLLM's id of the engine, of which no other has the same.
        capacity: bytes of host memory, for all ranks together.
        blocks_per_chunk: slots of a chunk.
        file: where it is kept, None: nowhere.
        own_memory: whether one rank has it to itself, in its scheduler's process.
    """

    engine: str
    capacity: int
    blocks_per_chunk: int
    file: Path | None
    own_memory: bool

    @property
    def place(self) -> tuple[Path, str]:
        """The directory and name of a pool that processes share."""
        if self.file is not None:
            return self.file.parent, self.file.name
        return _SHARED, "vllm-" + re.sub(r"[^A-Za-z0-9._-]", "_", self.engine)[:100]

    def num_slots(self, record_bytes: int) -> int:
        """Slots for whole chunks of records of that size.

        Raises:
            VLLMConfigError: less than one chunk.
        """
        row = -(-record_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        chunks = self.capacity // (row * self.blocks_per_chunk)
        if not chunks:
            raise VLLMConfigError(
                f"cpu_bytes_to_use is {self.capacity:,}, less than one chunk of "
                f"{self.blocks_per_chunk} block(s): {row * self.blocks_per_chunk:,} B over all "
                "ranks; raise it"
            )
        return chunks * self.blocks_per_chunk


def open_pool(
    wish: PoolWish,
    rank: int,
    offload: kvpolicy.Connector,
    contents: Mapping[str, Any],
) -> kvpolicy.HostPool:
    """The engine's pool, of every rank at once.

    Args:
        wish: what the configuration says.
        rank: this one's, in the engine.
        offload: this rank's connector, which says how long records are.
        contents: what the keys of a pool in a file mean.

    Raises:
        VLLMConfigError: no room for one chunk, or another rank has failed.
        PoolError: another pool, one that is in use, or no memory for it.
    """
    num_slots, record_bytes = wish.num_slots(offload.record_bytes), offload.record_bytes
    directory, name = wish.place
    pool: kvpolicy.HostPool | None = None

    def make() -> kvpolicy.PoolAddress | None:
        nonlocal pool
        if wish.own_memory:
            pool = kvpolicy.HostPool(num_slots, record_bytes, alignment=ROW_ALIGNMENT)
        elif rank == 0:
            shared = kvpolicy.SharedHostPool(
                name,
                num_slots,
                record_bytes,
                nonce=wish.engine,
                directory=directory,
                alignment=ROW_ALIGNMENT,
                max_ranks=_KEPT_MAX_RANKS if wish.file else offload.context.grid.size,
                keep=wish.file is not None,
                contents=contents,
            )
            if shared.opened == "joined":
                shared.close()
                raise VLLMConfigError(
                    f"another engine that runs has the pool {shared.path} and the same engine_id, "
                    f"{wish.engine!r}; give each an engine_id and a pool_file of its own"
                )
            pool = shared
            return shared.address()
        return None

    def join(address: kvpolicy.PoolAddress | None) -> None:
        nonlocal pool
        if pool is None and address is not None:
            pool = address.open()

    address = on_all_ranks(make)[0]
    on_all_ranks(lambda: join(address))
    if pool is None:
        raise VLLMConfigError("no rank has made a host pool; please report this")
    _opened[wish.engine] = pool
    return pool


def find_pool(wish: PoolWish) -> tuple[kvpolicy.HostPool, bool]:
    """The engine's pool, for its scheduler, once the workers have registered their caches.

    The scheduler is the last to join, so that a pool in shared memory needs its name no more: what
    kills the processes of an engine leaves no memory behind.

    Returns:
        The pool, and whether it was joined here, so that the scheduler is to leave it.

    Raises:
        VLLMConfigError: there is none.
    """
    pool = _opened.get(wish.engine)
    if pool is not None:
        return pool, False
    if wish.own_memory:
        raise VLLMConfigError(
            "the scheduler finds no host pool in its process: the worker runs elsewhere, or has "
            "not registered its caches; please report this with the executor in use"
        )
    directory, name = wish.place
    try:
        address = kvpolicy.PoolAddress.find(name, directory=directory, keep=wish.file is not None)
        if address.nonce != wish.engine:
            raise kvpolicy.PoolError(f"{directory / name} belongs to another engine")
        shared = address.open()
    except kvpolicy.PoolError as error:
        raise VLLMConfigError(f"the scheduler finds no host pool of its workers: {error}") from None
    if not address.keep:
        shared.unlink()
    return shared, True


def forget_others(
    pool: kvpolicy.SharedHostPool, formats: Mapping[str, kvpolicy.GroupFormat]
) -> str:
    """Forgets what a reopened pool holds in other formats, which nobody here could load.

    Returns:
        What was found, in words; "" for a pool that nobody had before.
    """
    if pool.opened != "reopened":
        return ""
    if pool.dropped:
        return f"pool file reopened, its records do not count: {pool.dropped}"
    wanted = {fmt.format_id: fmt for fmt in formats.values()}
    records = pool.records()
    others = [one for one in records if one.format.format_id not in wanted]
    pool.forget([one.slot for one in others])
    said = f"pool file reopened with {len(records) - len(others):,} record(s)"
    if others:
        differences = "; ".join(others[0].format.differences(next(iter(wanted.values()))))
        said += f", {len(others):,} of another format forgotten ({differences})"
    return said
