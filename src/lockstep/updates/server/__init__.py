"""An asynchronous parameter server, sharded over the ranks (Li et al., OSDI 2014).

counter     which slots of which window who computes next, what is to be applied, where all meet: pure decisions
desk        the counter for many askers at once: whoever cannot go on waits, whoever has died is missed
messages    what ranks say to each other: fixed headers and flat tensors, from point to point
shard       one rank's part of the parameters, and the user's optimizer over it
serving     the threads that answer for the desk and the shard of this rank
update      this rank as a worker: draw, pull, push, apply, meet
"""
