"""Implements a hook, and asks for an argument, of a plugin API that is far from out."""

import kvpolicy


class NewerHook:
    requires_api = 1000

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context, topology_of_tomorrow):
        return True

    @kvpolicy.hookimpl
    def compress_records(self, job):
        return None


policy = NewerHook()
