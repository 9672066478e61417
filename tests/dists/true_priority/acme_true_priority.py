"""True is not a priority."""

import kvpolicy


class TruePriority:
    priority = True

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return True


policy = TruePriority()
