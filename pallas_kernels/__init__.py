"""Per-device operations, one folder each; no mesh, no axis names, no model configuration."""
