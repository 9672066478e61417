"""One of two distributions that provide a plugin of one name."""

import kvpolicy


class DuplicateB:
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return False


policy = DuplicateB()
