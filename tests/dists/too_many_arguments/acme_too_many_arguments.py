"""A hook that asks for an argument which nobody offers."""

import kvpolicy


class TooManyArguments:
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context, weather):
        return weather == "fine"


policy = TooManyArguments()
