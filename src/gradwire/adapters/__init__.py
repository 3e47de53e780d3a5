"""Connections to frameworks."""
