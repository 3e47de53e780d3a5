"""Measuring on a network that is really slow, and supervising the ranks that run on it."""
