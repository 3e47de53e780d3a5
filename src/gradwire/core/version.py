"""The version of gradwire, for those who write it into what travels."""

VERSION = "0.3.0.dev0"
