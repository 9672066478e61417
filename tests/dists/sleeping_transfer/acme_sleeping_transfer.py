"""Takes every job and sleeps over it until ``release`` is set."""

import threading

import kvpolicy

release = threading.Event()


class Asleep(kvpolicy.TransferHandle):
    def __init__(self, job):
        self.job = job

    def done(self):
        return release.is_set()

    def result(self):
        return kvpolicy.TransferResult(
            job_id=self.job.job_id,
            ok=False,
            bytes=0,
            seconds=0.0,
            failed_ids=self.job.destinations.tolist(),
            error="slept over it",
        )


class SleepingTransfer:
    priority = 900

    @kvpolicy.hookimpl
    def transfer(self, job):
        return Asleep(job)


policy = SleepingTransfer()
