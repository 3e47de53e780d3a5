"""What training needs around a method, and nothing of any framework: `Session`, and the lane it communicates in."""

from gradwire.session.session import DEADLINE_S, Session, SessionStep

__all__ = ["DEADLINE_S", "Session", "SessionStep"]
