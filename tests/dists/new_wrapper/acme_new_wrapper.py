"""A wrapper around every other vote."""

import kvpolicy


class NewWrapper:
    @kvpolicy.hookimpl(wrapper=True)
    def prefer_cross_layer_blocks(self, context):
        return (yield)


policy = NewWrapper()
