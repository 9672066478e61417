"""A policy that takes fewer arguments than the hooks offer, at a priority of its own."""

import kvpolicy


class Good:
    priority = 10

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self):
        return kvpolicy.Vote(None, "good has no opinion")

    @kvpolicy.hookimpl
    def register_layers(self, context, caches):
        return None

    @kvpolicy.hookimpl
    def transfer(self):
        return None


policy = Good()
