"""An API version that is no number."""

import kvpolicy


class BadApi:
    requires_api = "1"

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return True


policy = BadApi()
