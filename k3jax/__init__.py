"""Kimi K3 as pure functions, and its device programs."""
