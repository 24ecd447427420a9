"""How the processes of a run find each other: flags of a start, which are no settings of the run."""

import dataclasses

from emapg_jax import distributed
from experiments.flags import field


@dataclasses.dataclass(frozen=True)
class Launch:
  """Flags of one start; of one process unless they say otherwise."""

  distributed: bool = field(False, "One of several processes, all with the same command, on a TPU pod slice, GKE, SLURM or Open MPI.")
  coordinator: str = field("", "Several processes elsewhere: HOST:PORT of process 0.")
  num_processes: int | None = field(None, "With coordinator: how many there are, at least 2.")
  process_id: int | None = field(None, "With coordinator: which of them this is, from 0.")
  heartbeat_timeout: int = field(30, "Seconds without a sign of life after which a process counts as dead, and the others end.")

  def __post_init__(self):
    values = {"coordinator": self.coordinator or None, "num_processes": self.num_processes, "process_id": self.process_id}
    by_hand = [value is not None for value in values.values()]
    given = " ".join(f"--{name}={value}" for name, value in values.items() if value is not None)
    if any(by_hand) and not all(by_hand):
      raise ValueError(f"{given} is not all of --coordinator=HOST:PORT, --num_processes and --process_id: give all three, or none.")
    if all(by_hand) and self.distributed:
      raise ValueError(
        f"--distributed finds the other processes in the environment, but {given} says where they are: leave one of both out."
      )
    if all(by_hand) and self.num_processes < 2:
      raise ValueError(f"{given}: there must be at least 2 processes; a single one needs none of these flags.")
    if all(by_hand) and not 0 <= self.process_id < self.num_processes:
      raise ValueError(f"{given}: the processes are numbered from 0 to {self.num_processes - 1}.")
    if self.heartbeat_timeout < 2:
      raise ValueError(f"--heartbeat_timeout={self.heartbeat_timeout} must be at least 2 seconds.")
    if self.heartbeat_timeout != type(self).heartbeat_timeout and not (self.distributed or all(by_hand)):
      raise ValueError(f"--heartbeat_timeout={self.heartbeat_timeout} has no effect with a single process: leave it out.")

  def connect(self, workdir: str) -> None:
    """Connects the processes, if there are several; before anything looks at a device.

    Raises:
      ValueError: they have no folder in common, or can't be connected.
    """
    if not (self.distributed or self.coordinator):
      return
    if not workdir:
      raise ValueError("Several processes need --workdir, the same folder for all of them: each would name a new one by its own clock.")
    if self.distributed:
      distributed.initialize(heartbeat_timeout=self.heartbeat_timeout)
    else:
      distributed.initialize(self.coordinator, self.num_processes, self.process_id, heartbeat_timeout=self.heartbeat_timeout)
