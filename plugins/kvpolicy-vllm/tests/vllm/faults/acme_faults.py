"""A copy engine that spoils the jobs it is told to, and leaves the others to whoever comes next.

``ACME_FAULTS`` is a list in JSON. Each fault has ``on`` ("load" or "store"), ``jobs`` (which of
this rank's jobs in that direction, from 0), and perhaps ``rank`` (else every rank), ``blocks``
(which of the job's blocks, from 0; else all) and ``silent`` (it is called a success).

``ACME_RANKS`` maps a rank to what it says otherwise than the others: a ``priority`` or a ``vote``.
"""

from __future__ import annotations

import json
import os

import numpy as np

import kvpolicy

RUBBISH = 0x3C  # a small number in every dtype of a cache


class AcmeFaults:
    """Knows its rank from the first context that it is asked about."""

    def __init__(self):
        self.rank = None
        self.seen = {"load": 0, "store": 0}
        self.bytes = {"load": 0, "store": 0}
        self.faults = json.loads(os.environ.get("ACME_FAULTS", "[]"))
        self.ranks = json.loads(os.environ.get("ACME_RANKS", "{}"))

    def _own(self, what, otherwise):
        return self.ranks.get(str(self.rank), {}).get(what, otherwise)

    @property
    def priority(self):
        return self._own("priority", 30)

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        self.rank = context.rank
        return self._own("vote", None)

    @kvpolicy.hookimpl
    def transfer(self, job):
        number = self.seen[job.direction]
        self.seen[job.direction] += 1
        self.bytes[job.direction] += job.bytes
        for fault in self.faults:
            here = fault.get("rank", self.rank) == self.rank
            if here and fault["on"] == job.direction and number in fault["jobs"]:
                return kvpolicy.TransferHandle.finished(spoil(job, fault))
        return None


def spoil(job, fault):
    """Copies what is not to fail, and writes rubbish where the rest should have gone."""
    chosen = fault.get("blocks", range(len(job.destinations)))
    spoilt = {int(job.destinations[place]) for place in chosen}
    rows, moved = job.rows.numpy(), 0
    for part in job.parts:
        for block, slot in zip(part.block_ids.tolist(), part.slots.tolist(), strict=True):
            fails = (slot if job.direction == "store" else block) in spoilt
            moved += 0 if fails else part.plan.block_bytes
            for one in part.plan.copies:
                memory = one.storage.numpy()
                base = one.offset + block * one.block_stride
                for frm, to, size in one.box.runs():
                    ends = [memory[base + frm : base + frm + size], rows[slot, to : to + size]]
                    source, target = ends if job.direction == "store" else ends[::-1]
                    np.copyto(target, RUBBISH if fails else source)
    silent = fault.get("silent", False)
    return kvpolicy.TransferResult(
        job_id=job.job_id,
        ok=silent,
        bytes=job.bytes if silent else moved,
        seconds=0.0,
        failed_ids=() if silent else sorted(spoilt),
        error="" if silent else "acme has failed",
    )


plugin = AcmeFaults()
