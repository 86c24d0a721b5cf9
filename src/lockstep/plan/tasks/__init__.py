"""A task that is here: one rank's profile, and what any number of them would make of a step."""
