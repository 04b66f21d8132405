"""The trainer's face of the package: `mr.megatron.connect(...)` on every training rank, then `trainer.refit(step)`."""

from mcore_reshard.trainers.megatron.connect import RefitTrainer, connect

__all__ = ["RefitTrainer", "connect"]
