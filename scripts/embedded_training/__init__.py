"""Training of the embedded model and of its draft."""
