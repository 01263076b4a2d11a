"""Mesh, axes, specs and collectives; knows nothing of the model."""
