"""Drivers run programs: in lockstep, over a process group, or for their cost alone."""
