"""Where gradients cross between tensors of different kinds and layouts, and where they are to lie."""
