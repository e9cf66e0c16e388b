"""A layer sharded over the ranks of a torch.distributed group: by heads (`tensor_parallel`) or by tokens
(`context_parallel`)."""

from .context_parallel import ShardedKV
from .tensor_parallel import join_heads, split_heads

__all__ = ["ShardedKV", "join_heads", "split_heads"]
