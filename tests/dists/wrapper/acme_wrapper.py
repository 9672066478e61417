"""An old-style wrapper around every other vote."""

import kvpolicy


class Wrapper:
    @kvpolicy.hookimpl(hookwrapper=True)
    def prefer_cross_layer_blocks(self, context):
        yield


policy = Wrapper()
