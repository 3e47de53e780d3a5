"""Servers and workers that talk over TCP, between machines."""
