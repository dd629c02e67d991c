"""DTensor: tensors whose pieces live on the ranks of a mesh."""
