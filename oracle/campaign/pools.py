"""Shards on pools of ranks of this machine: those of one rank beside each other, those of several by themselves."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from oracle.campaign.shards import Done, OnRanks, Shard, attempt
from oracle.evidence.ranks import RankPool


@dataclass(frozen=True, slots=True)
class OnPools:
    """pools: at work at a time, each on a shard of one rank. A shard of several ranks has the machine to itself."""

    pools: tuple[RankPool, ...]
    timeout: float = 1800.0

    def run(self, shards: Sequence[Shard]) -> Iterator[Done]:
        free: queue.SimpleQueue[RankPool] = queue.SimpleQueue()
        for pool in self.pools:
            free.put(pool)

        def one(shard: Shard) -> Done:
            pool = free.get()
            try:
                return attempt(shard, lambda: pool.run(1, shard.work, *shard.arguments, timeout=self.timeout))
            finally:
                free.put(pool)

        with ThreadPoolExecutor(len(self.pools)) as threads:
            for future in as_completed([threads.submit(one, shard) for shard in shards if shard.world_size == 1]):
                yield future.result()
        yield from OnRanks(self.pools[0], self.timeout).run([shard for shard in shards if shard.world_size > 1])
