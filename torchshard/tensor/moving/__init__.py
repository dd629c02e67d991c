"""DTensors that move: from one layout to another, to another mesh, and from one holding to another."""
