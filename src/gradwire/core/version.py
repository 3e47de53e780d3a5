"""The version of gradwire, for what is compared between processes."""

__version__ = "0.2.0"
