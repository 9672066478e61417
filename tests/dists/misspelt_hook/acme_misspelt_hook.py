"""A hook's name with a letter missing."""

import kvpolicy


class MisspeltHook:
    @kvpolicy.hookimpl
    def prefer_cross_layer_block(self, context):
        return True


policy = MisspeltHook()
