"""`gradwire federate`: a task trained by a federation on this machine, and what came of it."""
