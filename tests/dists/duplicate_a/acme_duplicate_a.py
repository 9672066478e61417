"""One of two distributions that provide a plugin of one name."""

import kvpolicy


class DuplicateA:
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return True


policy = DuplicateA()
