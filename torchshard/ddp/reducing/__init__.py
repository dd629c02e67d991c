"""A step from forward to the end of backward: which gradients come, when, and what leaves then."""
