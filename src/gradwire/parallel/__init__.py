"""Communication beyond data parallelism, as modules and functions for a model's author."""
