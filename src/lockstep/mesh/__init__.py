"""Ranks as a grid: data, shard, pipeline and tensor parallelism, alone and mixed."""
