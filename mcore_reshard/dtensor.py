"""The face of the package to DTensor trainers (FSDP2): `mr.dtensor.connect(...)` on every rank, then `trainer.refit(step)`."""

from mcore_reshard.trainers.dtensor.connect import connect
from mcore_reshard.trainers.refit_trainer import RefitTrainer

__all__ = ["RefitTrainer", "connect"]
