"""`gradwire compare`: what is measured, how good the evidence is, and what may be concluded."""
