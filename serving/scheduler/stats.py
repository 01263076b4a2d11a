"""What the prefix cache and drafts saved since the start: counters as a value."""

from __future__ import annotations

from typing import NamedTuple

from serving.page_table import Hit


class CacheStats(NamedTuple):
    """Counters that never fall. A request counts once, when it is first admitted.

    Attributes:
      looked_up_tokens: known tokens of admitted requests.
      full_hit_tokens, partial_hit_tokens, junction_hit_tokens: reused tokens, by where the state
        was kept: at a page boundary, inside a page, or at a junction.
      state_missed_tokens: attention entries were there beyond the hit, but no state.
      num_state_misses: requests with such tokens. num_misses: requests that found nothing at all.
      copied_pages, cleared_pages, padding_tokens: of all steps.
      tried_drafts, taken_drafts: proposed tokens that were verified, and those that stayed.
    """

    looked_up_tokens: int = 0
    full_hit_tokens: int = 0
    partial_hit_tokens: int = 0
    junction_hit_tokens: int = 0
    state_missed_tokens: int = 0
    num_state_misses: int = 0
    num_misses: int = 0
    copied_pages: int = 0
    cleared_pages: int = 0
    padding_tokens: int = 0
    tried_drafts: int = 0
    taken_drafts: int = 0

    @property
    def hit_tokens(self) -> int:
        """Reused tokens of all kinds."""
        return self.full_hit_tokens + self.partial_hit_tokens + self.junction_hit_tokens

    def with_hit(self, hit: Hit, known: int, page_tokens: int) -> CacheStats:
        """Count what a new request found."""
        kind = "junction" if hit.is_junction else "partial" if hit.tokens % page_tokens else "full"
        field = f"{kind}_hit_tokens"
        return self._replace(
            **{field: getattr(self, field) + hit.tokens},
            looked_up_tokens=self.looked_up_tokens + known,
            state_missed_tokens=self.state_missed_tokens + max(0, hit.junction - hit.tokens),
            num_state_misses=self.num_state_misses + (hit.junction > 0),
            num_misses=self.num_misses + (hit.tokens == 0 and hit.junction == 0),
        )
