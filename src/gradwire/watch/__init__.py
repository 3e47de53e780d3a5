"""A run that goes on: what its ranks tell, in a terminal or on a page of this machine."""

from gradwire.watch.following import Follower
from gradwire.watch.server import RunServer
from gradwire.watch.view import RankView, RunView, view_of

__all__ = ["Follower", "RankView", "RunServer", "RunView", "view_of"]
