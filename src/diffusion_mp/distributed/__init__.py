"""One graph over several processes: every rank of ``torch.distributed`` has a range of the nodes."""

from diffusion_mp.distributed.parallel import RankLostError, node_parallel
from diffusion_mp.distributed.sharded_graph import ShardedGraph

__all__ = ["RankLostError", "ShardedGraph", "node_parallel"]
