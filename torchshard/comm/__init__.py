"""Talking between ranks: collectives, agreement, and waiting that can tell why it waits."""
