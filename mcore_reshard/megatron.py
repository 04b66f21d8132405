"""The trainer's face of the package: `mr.megatron.connect(...)` on every training rank, then `trainer.refit(step)`."""

from mcore_reshard.trainers.megatron.connect import connect
from mcore_reshard.trainers.refit_trainer import RefitTrainer

__all__ = ["RefitTrainer", "connect"]
