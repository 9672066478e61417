"""Fails when it is asked to vote; would register whatever it gets."""

import kvpolicy


class RaisesInVote:
    priority = 900

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return context.options["acme"]["speed"] > 1

    @kvpolicy.hookimpl
    def register_layers(self, context, caches):
        return kvpolicy.Registration.from_caches(context, caches)


policy = RaisesInVote()
