"""Fails when it is asked to register."""

import kvpolicy


class RaisingRegistration:
    priority = 900

    @kvpolicy.hookimpl
    def register_layers(self, context, caches):
        raise KeyError("model.layers.0")


policy = RaisingRegistration()
