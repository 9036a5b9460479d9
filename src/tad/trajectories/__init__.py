"""What the teacher did: privileged prompts, rollouts, the store; states and partition; the window."""

from tad.trajectories.partition import masked, partition, state
from tad.trajectories.rollout import Rollout, RolloutConfig, roll_out
from tad.trajectories.store import Trajectory, TrajectoryStore

__all__ = [
    "Rollout",
    "RolloutConfig",
    "Trajectory",
    "TrajectoryStore",
    "masked",
    "partition",
    "roll_out",
    "state",
]
