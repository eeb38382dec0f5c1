"""One graph over several processes: every rank of ``torch.distributed`` has a run of its nodes."""

from diffusion_mp.distributed.collectives import RankLostError
from diffusion_mp.distributed.parallel import node_parallel
from diffusion_mp.distributed.sharded_graph import ShardedGraph

__all__ = ["RankLostError", "ShardedGraph", "node_parallel"]
