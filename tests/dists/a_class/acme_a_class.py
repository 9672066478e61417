"""A class where an instance belongs."""

import kvpolicy


class AClass:
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return True


policy = AClass
