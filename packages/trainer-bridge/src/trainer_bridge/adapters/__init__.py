"""Samples as the objects of known trainers, one module per trainer. Importing them loads no trainer.

`trl`, `verl`, `slime` (slime and miles), `skyrl`, `openrlhf`, `prime_rl`, `tinker`, and `datasets` (Hugging
Face datasets and Parquet). Each module says which version it was written against, where each field goes, and
what that trainer has no place for; `Omissions` decides what then happens.
"""

from __future__ import annotations

from trainer_bridge.adapters.omissions import Omission, Omissions

__all__ = ["Omission", "Omissions"]
