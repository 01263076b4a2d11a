"""What a router is told of the prefix cache: which prefixes each replica holds, as numbered events.

The engine's thread only notes what changed (`news`). Elsewhere the changes become the set of
prefixes that are held (`held`), and the differences of that set a log of events (`log`).
"""
