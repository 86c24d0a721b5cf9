"""Split a model over a mesh of ranks and run it, with torch's pipelining, FSDP and DTensor."""
