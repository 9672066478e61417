"""A copy engine with plain NumPy and a thread, whose transfers can be held back."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np

import kvpolicy

PATIENCE_SECONDS = 60  # after which a transfer that nobody lets go fails, lest an engine hang


class AcmeHandle(kvpolicy.TransferHandle):
    def __init__(self, job):
        self.job, self.begun, self.ended = job, time.perf_counter(), None

    def done(self):
        return self.ended is not None

    def result(self):
        return self.ended

    def end(self, error=""):
        self.ended = kvpolicy.TransferResult(
            job_id=self.job.job_id,
            ok=not error,
            bytes=0 if error else self.job.bytes,
            seconds=time.perf_counter() - self.begun,
            failed_ids=self.job.destinations.tolist() if error else (),
            error=error,
        )


class AcmeEngine:
    """Copies in the order of submission; ``hold`` and ``let_go`` are for tests."""

    priority = 20

    def __init__(self):
        self._go = threading.Event()
        self._go.set()
        self._waiting = []
        self._handles = queue.SimpleQueue()
        self._thread = None

    def hold(self):
        self._go.clear()

    def let_go(self):
        self._go.set()

    def waiting(self):
        """The directions of transfers that are held."""
        return list(self._waiting)

    @kvpolicy.hookimpl
    def transfer(self, job):
        if job.device != "cpu":
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="acme", daemon=True)
            self._thread.start()
        handle = AcmeHandle(job)
        if not self._go.is_set():
            self._waiting.append(job.direction)
        self._handles.put(handle)
        return handle

    def _serve(self):
        while True:
            handle = self._handles.get()
            if self._go.wait(PATIENCE_SECONDS):
                self._waiting.clear()
                copy(handle.job)
                handle.end()
            else:
                handle.end("acme was held for too long")


def copy(job):
    rows = job.rows.numpy()
    for part in job.parts:
        for block, slot in zip(part.block_ids.tolist(), part.slots.tolist(), strict=True):
            for one in part.plan.copies:
                memory = one.storage.numpy()
                base = one.offset + block * one.block_stride
                for frm, to, size in one.box.runs():
                    here = memory[base + frm : base + frm + size]
                    there = rows[slot, to : to + size]
                    if job.direction == "store":
                        np.copyto(there, here)
                    else:
                        np.copyto(here, there)


plugin = AcmeEngine()
