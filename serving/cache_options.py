"""From the cache options of the server to the policy of its page table."""

from __future__ import annotations

import argparse
import math
import re
from typing import Literal

from k3jax.config import ConfigError
from serving.page_table.alignment import PageGeometry
from serving.page_table.policy import CachePolicy, check_policy

DEFAULT_UNIT_TOKENS = 128

# What `--state-retention` can be; a number is a distance in tokens.
type Retention = Literal["dense", "semantic"] | int


def parse_retention(text: str) -> Retention:
    """Parse `dense`, `semantic` or a number of tokens."""
    if text == "dense" or text == "semantic":
        return text
    if re.fullmatch("[0-9]{1,18}", text) and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(
        f"got {text!r}; expected dense, semantic or a number of tokens >= 1"
    )


def cache_policy(
    geometry: PageGeometry,
    *,
    is_enabled: bool,
    hash_block_size: int | None,
    state_retention: Retention,
    keep_answer_end: bool,
    export_tokens: int | None = None,
) -> CachePolicy:
    """Fit the options to the page, whose length follows from the model and the mesh.

    Args:
      hash_block_size: tokens of a prefix key; None takes the largest that divides both
        `DEFAULT_UNIT_TOKENS` and the page. A model without recurrent layers has a key a page.
      export_tokens: granularity at which a step can store a state inside a chunk, if it can.

    Raises:
      ConfigError: a size does not divide another (KF-C18).
    """
    has_states = geometry.num_state_pages > 0
    unit_tokens = hash_block_size
    if unit_tokens is None:
        page_tokens = geometry.page_tokens
        unit_tokens = math.gcd(DEFAULT_UNIT_TOKENS, page_tokens) if has_states else page_tokens
    match state_retention:
        case "dense":
            retention_tokens = None
        case "semantic":
            retention_tokens = 0
        case int():
            retention_tokens = state_retention
    policy = CachePolicy(
        enabled=is_enabled,
        unit_tokens=unit_tokens,
        retention_tokens=retention_tokens,
        key_every_unit=unit_tokens < geometry.page_tokens,
        checkpoint_junctions=unit_tokens < geometry.page_tokens,
        export_tokens=export_tokens if has_states else None,
        keep_answer_end=keep_answer_end,
    )
    try:
        check_policy(policy, geometry)
    except ConfigError as error:
        hint = "; see --hash-block-size and --state-retention"
        raise ConfigError([problem + hint for problem in error.problems]) from error
    return policy
