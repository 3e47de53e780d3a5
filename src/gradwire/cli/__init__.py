"""The command line of gradwire."""
