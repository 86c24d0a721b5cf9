"""One Hydra output directory for all ranks of a script with `@hydra.main`, started by `lockstep
run`, torchrun, srun or mpirun. In the configuration:

    hydra:
      callbacks:
        lockstep:
          _target_: lockstep.integrations.hydra.OneOutputDirectory

Every rank runs Hydra. By default each would name its directory after the time at which it starts.
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
"""Settings of ranks other than 0, which write no copy of the configuration and no log file."""


class OneOutputDirectory(Callback):
    """A Hydra callback: all ranks use rank 0's `hydra.run.dir` or `hydra.sweep.dir`. Only rank 0
    writes the configuration and the log there.

    The ranks open a world for that, and close it again. The folder may be on a file system that all
    hosts share, or on each host's own. Hydra launchers that start processes (joblib, submitit)
    cannot be used with ranks.
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
            # Hydra composes the configuration of each job of a multirun again, with these overrides
            text = "null" if value is None else f"'{value}'"
            config.hydra.overrides.hydra.append(f"{name}={text}")
