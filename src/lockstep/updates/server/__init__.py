"""An asynchronous parameter server, sharded over the ranks (Li et al., OSDI 2014).

counter     pure decisions: which rank computes which slots next, which window to apply, and when
            all ranks synchronize
messages    what ranks send to each other, point to point: fixed headers and flat tensors
shard       one rank's part of the parameters, and the user's optimizer over it
serving     who answers: the `Dispatcher` on rank 0, which serves many askers at once, and the
            threads of a rank, which answer for its `Dispatcher` and its shard
all_shards  the shards of all ranks, as one rank reaches them
server_update  this rank as a worker: draw, pull, push, apply, synchronize
"""
