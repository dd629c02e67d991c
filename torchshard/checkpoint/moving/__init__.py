"""Bytes on their way: which go where, reading, casting, summing and writing them, and the destination."""
