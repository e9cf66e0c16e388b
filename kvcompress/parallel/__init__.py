"""A layer over the ranks of a torch.distributed group: its heads (`tensor_parallel`) or its tokens
(`context_parallel`)."""

from .context_parallel import ShardedKV
from .tensor_parallel import join_heads, split_heads

__all__ = ["ShardedKV", "join_heads", "split_heads"]
