"""Compose a configuration with Hydra from a file and overrides, as the value of a parameter of
`task()`. Hydra makes no output directory and sets up no logging here: `compose` only reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config import knob
from lockstep.errors import TaskError
from lockstep.runtime.extras import install


def of_omegaconf(kind: Any) -> bool:
    """Whether `kind` is a type of OmegaConf, which need not be installed."""
    return str(getattr(kind, "__module__", "")).startswith("omegaconf.")


def composed(key: str, file: Path, texts: Mapping[str, str]) -> Any:
    """Return the configuration that Hydra composes from `file` for the parameter `key`; `texts` are
    overrides by key. Raises TaskError if Hydra refuses, or if Hydra or the file is missing.
    """
    try:
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise TaskError(
            "missing-extra", what=f"--set {key}={file}", package="Hydra", install=install("hydra")
        ) from None
    if not file.is_file():
        raise TaskError("cannot-read", name=f"--set {key}", file=file, reason="no such file")
    overrides = [f"{path}={text}" for path, text in texts.items()]
    refusals = (HydraException, OmegaConfBaseException)
    with initialize_config_dir(str(file.parent), version_base="1.3"):
        try:
            return compose(file.name, overrides)
        except refusals as error:
            reason, known = " ".join(str(error).split()), list[str]()
            with suppress(*refusals):
                known += _paths(OmegaConf.to_container(compose(file.name)))
    near = "".join(knob.closest(path, known) for path in texts if path not in known)
    raise TaskError(
        "config-not-composed", key=key, file=file, overrides=overrides, reason=reason + near
    )


def _paths(value: Any, above: str = "") -> Iterator[str]:
    """Yield the path of each value in a composed configuration, such as optimizer, optimizer.lr."""
    for key, each in value.items() if isinstance(value, Mapping) else ():
        yield f"{above}{key}"
        yield from _paths(each, f"{above}{key}.")
