"""Processes, one for each rank: supervised, kept warm, and ended together."""
