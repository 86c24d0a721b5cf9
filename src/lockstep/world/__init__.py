"""The ranks that train together: init, World, groups, rendezvous."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `World` or `init`, for one release: `lockstep.world` was a module that had them."""
    if name in ("World", "init"):
        from lockstep.world import world

        return getattr(world, name)
    raise AttributeError(f"module 'lockstep.world' has no attribute {name!r}")
