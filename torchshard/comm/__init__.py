"""Talking: agreement between ranks, and waiting that can tell why it waits."""
