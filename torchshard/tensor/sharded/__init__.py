"""ShardedTensor: a tensor described by a list of boxes and their owners."""
