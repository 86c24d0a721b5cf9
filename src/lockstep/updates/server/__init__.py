"""An asynchronous parameter server, sharded over the ranks (Li et al., OSDI 2014).

counter     which slots of which window who computes next, what is to be applied, where all meet:
            pure decisions
messages    what ranks say to each other: fixed headers and flat tensors, from point to point
shard       one rank's part of the parameters, and the user's optimizer over it
serving     who answers: the desk for many askers at once, and the threads for this rank's desk and
            shard
all_shards  the shards of all ranks, as one of them reaches them
server_update  this rank as a worker: draw, pull, push, apply, meet
"""
