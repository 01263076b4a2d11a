"""Every interleaving of events on small tables: `explore(scenario)`."""

from tests.explorer.search import Explorer, Report, explore
from tests.explorer.world import Event, Player, Scenario, World

__all__ = ["Event", "Explorer", "Player", "Report", "Scenario", "World", "explore"]
