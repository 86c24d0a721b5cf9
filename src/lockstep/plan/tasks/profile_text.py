"""What was measured, in words."""

from __future__ import annotations

from lockstep.plan.tasks.of_task import Scaling
from lockstep.plan.tasks.profile import Profile, Side


def describe(profile: Profile, scaling: Scaling) -> str:
    """The phases of a step for each number of ranks side by side, and when gradients are complete."""
    kind = "GPU" if profile.device == "cuda" else f"{profile.cores} core{'s' * (profile.cores != 1)}"
    lines = [f"{profile.task}, profiled here ({kind}):"]
    lines += [_side(side) for side in profile.sides]
    ready = ", ".join(f"{100 * bucket.ready:.0f} %" for bucket in profile.buckets[:8])
    more = f" ... ({len(profile.buckets)} in all)" if len(profile.buckets) > 8 else ""
    size = profile.width * sum(bucket.elements for bucket in profile.buckets) / 1e6
    lines.append(f"  {size:.2f} MB of gradients; buckets are complete after {ready}{more} of the backward")
    if profile.messages:
        told = ", ".join(f"{1e3 * seconds:.2f} ms among {ranks} ranks" for ranks, seconds in sorted(profile.messages.items()))
        lines.append(f"  a message takes {told} of one host, and no less on a network")
    if profile.device == "cpu":
        lines += _shared(profile, scaling)
    return "\n".join(lines)


def _side(side: Side) -> str:
    ranks = "1 rank alone" if side.ranks == 1 else f"{side.ranks} ranks side by side"
    phases = {"loading": side.loading, "forward": side.forward, "backward": side.backward}
    each = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in phases.items())
    return (
        f"  {ranks}, {side.threads} thread{'s' * (side.threads != 1)} each, {side.steps} steps: a micro-batch {each} ms; a step besides: "
        f"optimizer {1e3 * side.optimizer:.2f}, other {1e3 * side.other:.2f} ms; spread {100 * side.spread:.1f} %"
    )


def _shared(profile: Profile, scaling: Scaling) -> list[str]:
    if scaling.per_host is None:
        return [
            f"  all ranks share these {profile.cores} cores; more ranks than cores take turns, and everything takes as many times as long"
        ]
    if scaling.per_host == 1:
        return ["  every rank has a host like this one for itself"]
    return [f"  {scaling.per_host} ranks share a host with {profile.cores} cores"]
