"""Written for a plugin API that is not out yet."""

import kvpolicy


class NewerApi:
    requires_api = 2

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return True


policy = NewerApi()
