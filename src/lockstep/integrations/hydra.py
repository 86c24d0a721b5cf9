"""Scripts with `@hydra.main` on ranks that `lockstep run`, torchrun, srun or mpirun starts: one
output directory for all. In the configuration:

    hydra:
      callbacks:
        lockstep:
          _target_: lockstep.integrations.hydra.OneOutputDirectory

Every rank runs Hydra, and each would name its directory after the second in which it came to that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.collectives.broadcast_json import said_by
from lockstep.runtime import extras
from lockstep.world.world import init

try:
    from hydra.experimental.callback import Callback
    from omegaconf import DictConfig, OmegaConf
except ImportError as error:
    raise extras.missing("lockstep.integrations.hydra", f"Hydra ({error})", "hydra") from None

_OTHERS = {
    "hydra.output_subdir": None,
    "hydra.job_logging.handlers.file.filename": os.devnull,
}
"""On ranks other than 0: they write no copy of the configuration and no log file."""


class OneOutputDirectory(Callback):
    """A callback of Hydra: all ranks take rank 0's `hydra.run.dir`, or `hydra.sweep.dir`, and rank 0
    alone writes the configuration and the log there.

    The ranks open a world for that, and close it again. Hosts must share the folder's file system,
    or have it each for itself. Launchers of Hydra that start processes (joblib, submitit) are not
    for ranks.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hydra calls this before it makes the directory of a single run.

        Args:
            config, kwargs: Hydra's.
        """
        _agree(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hydra calls this before it makes the directory of a multirun.

        Args:
            config, kwargs: Hydra's.
        """
        _agree(config, "hydra.sweep.dir")


def _agree(config: DictConfig, key: str) -> None:
    mine = str(Path(OmegaConf.select(config, key)).absolute())
    with init() as world:
        folder = said_by(0, mine, world.control, key)
        others = {} if world.rank == 0 else _OTHERS
    for name, value in {key: folder, **others}.items():
        if OmegaConf.select(config, name) is not None:
            OmegaConf.update(config, name, value)
            # each job of a multirun is composed anew, with these
            text = "null" if value is None else f"'{value}'"
            config.hydra.overrides.hydra.append(f"{name}={text}")
