"""A hook that wants to be asked after everybody."""

import kvpolicy


class Trylast:
    @kvpolicy.hookimpl(trylast=True)
    def prefer_cross_layer_blocks(self, context):
        return True


policy = Trylast()
