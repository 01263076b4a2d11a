"""Per-device operators of the Kimi K3 decoder, one folder each.

Every folder has an `api` (checks its arguments, then dispatches), a float32 `reference` of an
independent form that defines the meaning, and `xla`, the portable implementation. Operators see
plain per-device arrays: no mesh, no axis names, no model configuration.
"""
