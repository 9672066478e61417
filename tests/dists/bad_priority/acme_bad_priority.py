"""A priority that is no number."""

import kvpolicy


class BadPriority:
    priority = "high"

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return True


policy = BadPriority()
