"""A hook that wants to be asked before everybody."""

import kvpolicy


class Tryfirst:
    @kvpolicy.hookimpl(tryfirst=True)
    def prefer_cross_layer_blocks(self, context):
        return True


policy = Tryfirst()
