"""Two functions for one hook, of which only one could be asked."""

import kvpolicy


class HookTwice:
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self):
        return True

    @kvpolicy.hookimpl(specname="prefer_cross_layer_blocks")
    def on_second_thoughts(self):
        return False


policy = HookTwice()
