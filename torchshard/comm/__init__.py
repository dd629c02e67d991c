"""Talking between ranks."""
