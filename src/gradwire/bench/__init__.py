"""`gradwire bench`: how fast collectives, exchanges and methods are on the network at hand."""
