"""A module that is a plugin: plain functions, and a priority beside them."""

import kvpolicy

priority = 7


@kvpolicy.hookimpl
def prefer_cross_layer_blocks(context):
    return kvpolicy.Vote(None, f"{len(context.geometry.layers)} layers seen")
