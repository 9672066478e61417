"""Votes with a string, which is true of every string but one."""

import kvpolicy


class WrongVote:
    priority = 900

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return "no"

    @kvpolicy.hookimpl
    def register_layers(self, context, caches):
        return kvpolicy.Registration.from_caches(context, caches)


policy = WrongVote()
