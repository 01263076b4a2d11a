"""Speculative decoding on the device: draft models, and what of their tokens the target takes."""
