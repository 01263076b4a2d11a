"""Reading ahead with a few threads and a bound on the memory in flight."""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor


def read_ahead[Item, Result](
    items: Iterable[Item],
    produce: Callable[[Item], Result],
    *,
    cost: Callable[[Item], int],
    max_cost: int,
    threads: int,
) -> Generator[tuple[Item, Result]]:
    """Yield `(item, produce(item))` in order, while later items are produced in threads.

    An item counts from its start until the consumer asks for the next one. The costs of all such
    items stay within `max_cost`; an item that costs more on its own is produced alone. If an item
    fails, or the consumer closes the generator, nothing new is started, and no thread is left.
    """
    pending: collections.deque[tuple[Item, Future[Result]]] = collections.deque()
    in_flight = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        try:
            for item in items:
                while pending and in_flight + cost(item) > max_cost:
                    done, future = pending.popleft()
                    yield done, future.result()
                    in_flight -= cost(done)
                    del future
                in_flight += cost(item)
                pending.append((item, pool.submit(produce, item)))
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
                del future
        finally:
            for _, future in pending:
                future.cancel()
