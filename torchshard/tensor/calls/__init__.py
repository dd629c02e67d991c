"""From an operator's call to what runs on this rank: entries, plans, first runs, and what stands beside DTensors."""
