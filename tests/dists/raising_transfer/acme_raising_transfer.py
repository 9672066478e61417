"""Fails when it is given a job."""

import kvpolicy


class RaisingTransfer:
    priority = 900

    @kvpolicy.hookimpl
    def transfer(self, job):
        raise OSError("the bus is full")


policy = RaisingTransfer()
