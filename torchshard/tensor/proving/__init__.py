"""Rules proved, and rules that users add."""
