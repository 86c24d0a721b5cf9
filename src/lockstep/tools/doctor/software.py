"""Python, torch and what it was built with, against what this library supports."""

from __future__ import annotations

import operator
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from lockstep.tools.finding import Finding, judged

_DRIVER = Path("/proc/driver/nvidia/version")
_COMPARE = {
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    "==": operator.eq,
}


def findings() -> list[Finding]:
    """Of the installation that runs this."""
    import torch
    import torch.distributed as dist

    python, torch_range = required()
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    gpus = (
        [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and "nccl" in backends else ""
    driver = _DRIVER.read_text() if _DRIVER.exists() else ""
    return [
        version("Python", platform.python_version(), python),
        version("torch", torch.__version__, torch_range),
        system(sys.platform, platform.machine()),
        judged(
            "backends",
            ", ".join(backends),
            fix=(
                ""
                if "gloo" in backends
                else "this torch was built without gloo: install a wheel of it"
            ),
        ),
        graphics(gpus, torch.version.cuda, driver, nccl),
    ]


def required() -> tuple[str, str]:
    """The versions of Python and torch that the installed package asks for; "" where it is not
    installed, only on the path.
    """
    try:
        about = metadata.metadata("lockstep-train")
    except metadata.PackageNotFoundError:
        return "", ""
    needs = [
        text.removeprefix("torch")
        for text in about.get_all("Requires-Dist", ())
        if re.match(r"torch[<>=]", text)
    ]
    return next(iter(about.get_all("Requires-Python", ())), ""), needs[0] if needs else ""


def version(name: str, found: str, wanted: str) -> Finding:
    """`wanted`: as in `>=2.11,<2.14`."""
    outside = [part for part in wanted.split(",") if part and not _satisfies(found, part.strip())]
    why = (
        f"{name} {found} is outside {wanted}, with which this version of Lockstep is tested:"
        " install one that is inside"
    )
    supported = f" (supported: {wanted})" if wanted else ""
    return judged(name, found + supported, fix=why if outside else "")


def system(name: str, machine: str) -> Finding:
    """Where it runs."""
    warn = (
        ""
        if name == "linux"
        else f"{name} is not tested: ranks use the backend's own transport there, not shared memory"
    )
    if name == "linux" and machine not in ("x86_64", "AMD64"):
        warn = (
            f"on {machine} ranks do not use shared memory, whose order of writes is relied on for"
            " x86 only: sums go through the backend"
        )
    return judged("system", f"{name} {machine}", warn=warn)


def graphics(gpus: Sequence[str], built_for: str | None, driver: str, nccl: str) -> Finding:
    """`driver`: what the kernel's module says of itself; "" where there is none."""
    number = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", driver)
    named = f"driver {number[1]}" if number else "no driver"
    if gpus:
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
        return judged(
            "GPUs", f"{kinds}; {named}, CUDA {built_for}" + (f", NCCL {nccl}" if nccl else "")
        )
    if driver and built_for is None:
        return judged(
            "GPUs",
            f"none that torch sees; {named}",
            warn="a GPU driver is loaded, but this torch is built for CPUs: install a CUDA wheel",
        )
    if driver:
        why = (
            f"a GPU driver is loaded, but torch (CUDA {built_for}) sees no GPU: look at"
            " CUDA_VISIBLE_DEVICES, the container's GPU option and the driver's age"
        )
        return judged("GPUs", f"none that torch sees; {named}", fix=why)
    return judged("GPUs", "none")


def _satisfies(found: str, part: str) -> bool:
    match = re.match(r"(>=|<=|==|<|>)\s*([\d.]+)", part)
    return match is None or bool(_COMPARE[match[1]](_numbers(found), _numbers(match[2])))


def _numbers(text: str) -> tuple[int, ...]:
    digits = re.match(r"[\d.]*", text.partition("+")[0])[0]  # type: ignore[index]  # matches all
    return tuple(int(number) for number in digits.strip(".").split("."))[:2]
