"""The vocabulary everything else is written in: grains, payloads, keys, collectives, state, registry, errors."""
