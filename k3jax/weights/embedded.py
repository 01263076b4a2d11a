"""The embedded model: a small K3 that was trained for this package, and its draft model.

Both are checkpoints in the released layout, read like any other. `scripts/train_embedded.py` made
them; `training.json` beside them says of what, and how good they are.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent / "embedded_model"
EMBEDDED_MODEL = _FOLDER / "model"
EMBEDDED_DRAFT = _FOLDER / "draft"
