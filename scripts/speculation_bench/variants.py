"""What is compared: one engine a way of drafting, each with its own compiled steps."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from speculation_bench.prompts import MAX_CHARS

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.paged_model import PagedModel
from k3jax.program import DRAFT_PREFIX
from k3jax.step import serving_step
from serving.build import LoadedModel
from serving.executor import Executor
from serving.page_table.alignment import PageGeometry, align
from serving.scheduler import Limits, make_limits
from serving.score import Scorer

_STEPS_OF_A_BUILD = 3

Drafter = Literal["none", "dspark", "ngram"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of drafting.

    Attributes:
      num_drafts: of a step.
      cost: see `Limits.draft_cost`; 0 always takes `num_drafts`, else that is the most.
    """

    drafter: Drafter
    num_drafts: int
    cost: float = 0.0

    @property
    def name(self) -> str:
        if self.drafter == "none":
            return "none"
        return f"{self.drafter} {self.num_drafts}{' adaptive' if self.cost else ''}"

    @property
    def model_drafts(self) -> int:
        """Drafts of its draft model; variants with as many share a model."""
        return self.num_drafts if self.drafter == "dspark" else 0

    @property
    def decode_tokens(self) -> int:
        return 1 + self.num_drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A variant that can run."""

    model: PagedModel
    executor: Executor
    limits: Limits
    geometry: PageGeometry
    num_pages: int


def choose_variants(
    drafts: Sequence[int], *, ngram_drafts: int, adaptive_cost: float
) -> tuple[Variant, ...]:
    """Without drafts, with each number of them, with the most at the controller's choice, and with
    n-grams."""
    return (
        Variant(drafter="none", num_drafts=0),
        *(Variant(drafter="dspark", num_drafts=count) for count in sorted({*drafts})),
        Variant(drafter="dspark", num_drafts=max(drafts), cost=adaptive_cost),
        Variant(drafter="ngram", num_drafts=ngram_drafts),
    )


class Builds:
    """Compilations in threads: first without drafts and with the most, then from the middle on.

    Some builds at a time, so that the first ones are there if time does not suffice for all.

    Args:
      loaded: the model with its draft model.
      score_tokens: of the longest sequence that the scorer takes.
    """

    def __init__(self, loaded: LoadedModel, variants: Iterable[Variant], *, score_tokens: int):
        at_once = max(1, (os.cpu_count() or 1) // _STEPS_OF_A_BUILD)
        self._threads = concurrent.futures.ThreadPoolExecutor(max_workers=at_once)
        self._variants: dict[int, list[Variant]] = {}
        for variant in variants:
            self._variants.setdefault(variant.model_drafts, []).append(variant)
        most = max(self._variants)
        order = sorted(self._variants, key=lambda n: (n not in (0, most), abs(2 * n - most), n))
        self._builds = {
            count: self._threads.submit(
                _timed, lambda part=self._variants[count]: _build(loaded, part)
            )
            for count in order
        }
        plain = _of_engine(loaded, 0)
        self._scorer = self._threads.submit(
            lambda: Scorer(
                plain, max_tokens=score_tokens, max_step_tokens=score_tokens, with_decode=False
            )
        )

    def wait(
        self, until_s: float, say: Callable[[str], None]
    ) -> tuple[dict[Variant, Built], dict[Variant, str], Scorer | None]:
        """What is compiled at a time of the monotonic clock, and why the rest is not."""
        built: dict[Variant, Built] = {}
        failures: dict[Variant, str] = {}
        for count, build in self._builds.items():
            try:
                of_model, seconds = build.result(timeout=max(0.0, until_s - time.monotonic()))
                built |= of_model
                say(f"compiled for {count} drafts of a model in {seconds:.0f} s")
            except Exception as error:
                reason = f"not compiled: {describe(error)}"
                say(f"{count} drafts of a model: {reason}")
                failures |= {variant: reason for variant in self._variants[count]}
        try:
            scorer = self._scorer.result(timeout=max(0.0, until_s - time.monotonic()))
        except Exception as error:
            say(f"no scorer: {describe(error)}")
            scorer = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        return built, failures, scorer


def describe(error: BaseException) -> str:
    """One line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _timed(build: Callable[[], dict[Variant, Built]]) -> tuple[dict[Variant, Built], float]:
    start_s = time.monotonic()
    return build(), time.monotonic() - start_s


def _of_engine(loaded: LoadedModel, num_drafts: int) -> LoadedModel:
    """The model for an engine whose draft model makes so many drafts; for none, without one."""
    engine = dataclasses.replace(loaded.engine, num_drafts=num_drafts)
    if num_drafts:
        return dataclasses.replace(loaded, engine=engine)
    spec = cache_spec(loaded.cfg, tp=loaded.parallel.tp, dtype=engine.dtype)
    target = {
        part: leaves for part, leaves in loaded.params.items() if not part.startswith(DRAFT_PREFIX)
    }
    geometry = align(spec, unit_tokens=loaded.geometry.unit_tokens)
    return dataclasses.replace(
        loaded, engine=engine, draft=None, spec=spec, geometry=geometry, params=target
    )


def _build(loaded: LoadedModel, variants: Sequence[Variant]) -> dict[Variant, Built]:
    """Compile the steps of variants that share a model: one of prompts, one of each width."""
    loaded = _of_engine(loaded, variants[0].model_drafts)
    geometry, engine = loaded.geometry, loaded.engine
    pages = -(-engine.max_context_tokens // geometry.page_tokens)
    num_pages = 1 + 2 * (pages + geometry.num_state_pages)
    prefill = Bucket("prefill", min(MAX_CHARS, engine.max_context_tokens), 1, pages)
    decode = {variant: Bucket("decode", variant.decode_tokens, 1, pages) for variant in variants}
    model = PagedModel(
        loaded.program(num_pages), loaded.mesh, loaded.params, serving_step,
        sorted({prefill, *decode.values()}),
    )  # fmt: skip
    return {
        variant: Built(
            model=model,
            executor=Executor(model),
            limits=dataclasses.replace(
                make_limits(
                    dataclasses.replace(
                        engine, num_drafts=variant.num_drafts, max_prefill_tokens=prefill.tokens
                    ),
                    geometry, num_pages=num_pages, vocab_size=loaded.cfg.vocab_size,
                    draft_cost=variant.cost,
                    drafter="ngram" if variant.drafter == "ngram" else "device",
                ),
                buckets=(prefill, decode[variant]),
            ),
            geometry=geometry,
            num_pages=num_pages,
        )
        for variant in variants
    }  # fmt: skip
