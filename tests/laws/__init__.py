"""The laws every codec and reducer obeys.

`subjects` finds what is registered and the inputs to try it on, `checks` are the laws as plain functions, and the
tests apply one to the other. `test_mutants` breaks codecs on purpose and shows that the laws notice. Nothing here
lists methods by name: a new registry line is tested as soon as it is written.
"""
