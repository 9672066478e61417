"""Ranks of a parallel grid, in vLLM's world-rank order: stages outermost, then PCP, then TP."""

from __future__ import annotations

import attrs

from kvpolicy.errors import GeometryError, Refusal
from kvpolicy.values import int_between, is_whole
from kvpolicy.words import shown

MAX_RANKS = 4_096
_degree = int_between(1, MAX_RANKS)


@attrs.frozen(kw_only=True)
class Rank:
    """One worker's place: its world rank and its coordinates."""

    rank: int
    pp_rank: int
    pcp_rank: int
    tp_rank: int
    dcp_rank: int
    cp_rank: int


@attrs.frozen(kw_only=True)
class ParallelGrid:
    """How the cache is spread over ranks.

    Attributes:
        tp: tensor parallel size; splits heads.
        pp: pipeline parallel size; splits layers.
        dcp: decode context parallel size, inside the TP group; spreads tokens over replicas.
        pcp: prefill context parallel size; adds ranks and spreads tokens.
        cp_interleave: tokens of one chunk when tokens are spread; means nothing at cp 1.

    Raises:
        GeometryError: a degree < 1, ``tp % dcp``, or more than 4,096 ranks.
    """

    tp: int = attrs.field(default=1, validator=_degree)
    pp: int = attrs.field(default=1, validator=_degree)
    dcp: int = attrs.field(default=1, validator=_degree)
    pcp: int = attrs.field(default=1, validator=_degree)
    cp_interleave: int = attrs.field(default=1, validator=int_between(1, 65_536))

    def __attrs_post_init__(self) -> None:
        if self.tp % self.dcp:
            raise GeometryError(
                f"dcp {self.dcp} does not divide tp {self.tp}: DCP lives inside the TP group"
            )
        if self.size > MAX_RANKS:
            raise GeometryError(f"a grid has at most {MAX_RANKS:,} ranks, not {self.size:,}")

    @property
    def cp(self) -> int:
        """Ranks over which the tokens of one block are spread."""
        return self.dcp * self.pcp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.pcp

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return self.pp * self.stage_size

    def rank(self, rank: int) -> Rank:
        """The coordinates of a world rank.

        Raises:
            GeometryError: not a rank of this grid.
        """
        if not is_whole(rank) or not 0 <= rank < self.size:
            raise GeometryError(f"rank {shown(rank)} is not one of this grid's {self.size} ranks")
        stage, inside = divmod(rank, self.stage_size)
        pcp_rank, tp_rank = divmod(inside, self.tp)
        dcp_rank = tp_rank % self.dcp
        return Rank(
            rank=rank,
            pp_rank=stage,
            pcp_rank=pcp_rank,
            tp_rank=tp_rank,
            dcp_rank=dcp_rank,
            cp_rank=pcp_rank * self.dcp + dcp_rank,
        )

    def ranks(self) -> tuple[Rank, ...]:
        """Every rank, in world-rank order."""
        return tuple(self.rank(rank) for rank in range(self.size))


@attrs.frozen(kw_only=True)
class HeadShards:
    """How ``total`` heads lie over the TP ranks: ``count`` shards, each on ``replicas`` ranks."""

    total: int
    count: int
    replicas: int

    @property
    def heads(self) -> int:
        """Heads of one shard."""
        return self.total // self.count

    def shard(self, tp_rank: int) -> int:
        """The shard that a TP rank holds."""
        return tp_rank // self.replicas


def head_shards(total_kv_heads: int, grid: ParallelGrid) -> HeadShards | Refusal:
    """Splits or replicates heads over TP, or says why that cannot be."""
    tp = grid.tp
    if total_kv_heads >= tp and total_kv_heads % tp == 0:
        shards = HeadShards(total=total_kv_heads, count=tp, replicas=1)
    elif tp > total_kv_heads and tp % total_kv_heads == 0:
        shards = HeadShards(
            total=total_kv_heads, count=total_kv_heads, replicas=tp // total_kv_heads
        )
    else:
        fit = [str(n) for n in range(1, total_kv_heads + 1) if total_kv_heads % n == 0]
        return Refusal(
            "heads-not-divisible",
            f"{total_kv_heads} KV heads can be neither split nor replicated evenly over tp {tp}; "
            f"possible tp: {', '.join(fit[-12:])} and multiples of {total_kv_heads}",
        )
    if shards.replicas % grid.dcp:
        return Refusal(
            "dcp-not-divisible",
            f"dcp {grid.dcp} spreads tokens over the ranks that hold the same heads, and "
            f"{total_kv_heads} KV heads at tp {tp} have {shards.replicas} such rank(s); choose a "
            f"dcp that divides {shards.replicas}, or a tp that is a multiple of "
            f"{total_kv_heads * grid.dcp}",
        )
    return shards
