"""Page size by the four-step alignment, and what a pool of such pages holds (cache-semantics.md
section 1).

One page must serve two kinds of layer: the MLA entries of `page_tokens` tokens, or one KDA state.
The entries fill the page exactly; the state is padded up to it. All sizes are bytes of one rank and
one layer position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from k3jax.cache_spec import CacheSpec
from k3jax.config import ConfigError

KERNEL_TOKENS = 16  # smallest token block that every attention kernel accepts
UNIT_TOKENS = 128  # MLA decode kernels want a multiple of this many tokens in a page
WORD_BYTES = 2  # the pool is one array of 16-bit words


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """Sizes of a page.

    Attributes:
      page_tokens: `W`, tokens in an attention page.
      unit_tokens: what `page_tokens` is a multiple of.
      token_bytes: MLA entry of one token in one layer.
      state_bytes: KDA state of one request in one layer, without padding; 0 if the model has none.
      num_positions: `Z`, layer positions of the pool; a page number owns one page in each.
      num_state_pages: pages of a request that hold state, one a recurrent group.
      num_state_layers: recurrent layers in all; the other layer positions of the state pages stay
        unused.
    """

    page_tokens: int
    unit_tokens: int
    token_bytes: int
    state_bytes: int
    num_positions: int
    num_state_pages: int
    num_state_layers: int

    @property
    def page_bytes(self) -> int:
        """Of one page in one layer position."""
        return self.page_tokens * self.token_bytes

    @property
    def page_words(self) -> int:
        """16-bit words of one page in one layer position."""
        return self.page_bytes // WORD_BYTES

    @property
    def state_padding_bytes(self) -> int:
        """Bytes that a state leaves unused in its page; 0 if the model has no state."""
        return self.page_bytes - self.state_bytes if self.num_state_pages else 0

    @property
    def state_padding_percent(self) -> float:
        """Padding as a share of the state, in percent."""
        return 100.0 * self.state_padding_bytes / self.state_bytes if self.num_state_pages else 0.0

    @property
    def unused_state_positions(self) -> int:
        """Layer positions of a request's state pages that no layer uses."""
        return self.num_state_pages * self.num_positions - self.num_state_layers

    @property
    def slab_bytes(self) -> int:
        """Of one page number: a page in every layer position."""
        return self.page_bytes * self.num_positions

    def attention_pages(self, num_tokens: int) -> int:
        """Attention pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def request_pages(self, num_tokens: int) -> int:
        """All pages of a request that holds `num_tokens` tokens, state pages included."""
        return self.attention_pages(num_tokens) + self.num_state_pages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a pool holds.

    Attributes:
      usable_pages: without the null page 0.
      total_bytes: of all layer positions, null page included.
      tokens: cached tokens of one request that has the pool to itself.
      requests: requests of at most one attention page each.
    """

    usable_pages: int
    total_bytes: int
    tokens: int
    requests: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LcmPage:
    """A large page that every kind of small page divides.

    Attributes:
      page_bytes: least common multiple of all small pages.
      counts: small pages of each kind in one large page.
    """

    page_bytes: int
    counts: Mapping[str, int]


def align(
    spec: CacheSpec,
    *,
    kernel_tokens: int = KERNEL_TOKENS,
    unit_tokens: int = UNIT_TOKENS,
    block_tokens: int | None = None,
    export_tokens: int | None = None,
) -> PageGeometry:
    """Choose the smallest page that holds a state and suits the kernels.

    1. The kernel block, or the configured block if that is larger. 2. Bytes of a token and of a
    state. 3. Tokens
    of a page: a multiple of the unit whose bytes hold the state. 4. The state is padded to the
      page.

    Args:
      kernel_tokens: token block of the attention kernels.
      unit_tokens: further multiple that the kernels want.
      block_tokens: block size the operator asked for.
      export_tokens: granularity at which the prefill kernel can export a state inside a chunk, if
        it can.

    Raises:
      ConfigError: a size is not positive, or an entry or a state is not whole 16-bit words.
    """
    state_bytes = spec.state_bytes if spec.recurrent_groups else 0
    _check_sizes(
        positive={
            "kernel_tokens": kernel_tokens,
            "unit_tokens": unit_tokens,
            "block_tokens": 1 if block_tokens is None else block_tokens,
            "export_tokens": 1 if export_tokens is None else export_tokens,
            "token_bytes": spec.token_bytes,
        },
        words={"token_bytes": spec.token_bytes, "state_bytes": state_bytes},
    )
    unit = math.lcm(max(kernel_tokens, block_tokens or 0, unit_tokens), export_tokens or 1)
    units = max(1, -(-state_bytes // (unit * spec.token_bytes)))
    page_tokens = -(-unit * units // kernel_tokens) * kernel_tokens
    return PageGeometry(
        page_tokens=page_tokens,
        unit_tokens=unit,
        token_bytes=spec.token_bytes,
        state_bytes=state_bytes,
        num_positions=spec.num_positions,
        num_state_pages=len(spec.recurrent_groups),
        num_state_layers=sum(len(group.layers) for group in spec.recurrent_groups),
    )


def capacity(geometry: PageGeometry, num_pages: int) -> Capacity:
    """What a pool of `num_pages` pages, the null page included, holds.

    Raises:
      ConfigError: the pool cannot hold even one token of one request.
    """
    usable = num_pages - 1
    needed = geometry.request_pages(1)
    if usable < needed:
        raise ConfigError(
            f"num_pages is too small: got {num_pages}; expected >= {needed + 1} (the null page, "
            f"{geometry.num_state_pages} state pages and an attention page for one request)"
        )
    return Capacity(
        usable_pages=usable,
        total_bytes=num_pages * geometry.slab_bytes,
        tokens=(usable - geometry.num_state_pages) * geometry.page_tokens,
        requests=usable // needed,
    )


def pages_in(geometry: PageGeometry, pool_bytes: int) -> int:
    """Pages, the null page included, of a pool that may take `pool_bytes` on each rank."""
    return pool_bytes // geometry.slab_bytes


def report(geometry: PageGeometry, num_pages: int, *, num_replicas: int = 1) -> str:
    """The memory plan of the pool for people, several lines; bytes are those of one rank, pages
    those of one replica."""
    held = capacity(geometry, num_pages)
    lines = [
        f"page: {geometry.page_tokens:,} tokens x {geometry.token_bytes:,} B = "
        f"{geometry.page_bytes:,} B in each of {geometry.num_positions} layer positions",
    ]
    if geometry.num_state_pages:
        lines.append(
            f"state: {geometry.state_bytes:,} B + {geometry.state_padding_bytes:,} B padding "
            f"({geometry.state_padding_percent:.1f} %), {geometry.num_state_pages} pages a "
            f"request, which leave {geometry.unused_state_positions} of "
            f"{geometry.num_state_pages * geometry.num_positions} layer positions unused"
        )
    each = f" of each of {num_replicas} replicas" if num_replicas > 1 else ""
    lines.append(
        f"pool{each}: {num_pages:,} pages (one is the null page) = {held.total_bytes:,} B; "
        f"holds {held.tokens:,} tokens of one request, or {held.requests:,} requests of up to "
        f"{geometry.page_tokens:,} tokens"
    )
    return "\n".join(lines)


def lcm_page(sizes: Mapping[str, int]) -> LcmPage:
    """The large page of cache kinds whose pages divide it evenly: 1, 2 and 3 KB share one of 6 KB.

    Args:
      sizes: bytes of a small page by kind.

    Raises:
      ConfigError: there is no kind, or a size is not positive.
    """
    if not sizes:
        raise ConfigError("sizes is empty: got no cache kind; expected at least one")
    _check_sizes(positive=sizes, words={})
    page_bytes = math.lcm(*sizes.values())
    return LcmPage(
        page_bytes=page_bytes, counts={kind: page_bytes // size for kind, size in sizes.items()}
    )


def _check_sizes(*, positive: Mapping[str, int], words: Mapping[str, int]) -> None:
    problems = [
        f"{name} is out of range: got {value}; expected >= 1"
        for name, value in positive.items()
        if value < 1
    ]
    problems += [
        f"{name} is not whole 16-bit words: got {value}; expected an even number"
        for name, value in words.items()
        if value % WORD_BYTES
    ]
    if problems:
        raise ConfigError(problems)
