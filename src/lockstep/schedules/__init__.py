"""What a schedule of a collective does: a proof of its result, and its time on a modelled network."""
