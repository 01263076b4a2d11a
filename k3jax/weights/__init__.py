"""Weights: from a released checkpoint to the described tree on a mesh, and back to files."""
