"""Pickles without Python's pickle: read as inert data, written from plain data."""
