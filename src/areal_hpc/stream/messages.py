"""What ranks say to each other: small frozen records, pickled (protocol 5).

Two channels carry them (`mailbox.py`), each first-in-first-out for a pair of ranks:

- mail: `Group`, `Tombstone` and `Saved`, from a leader to a trainer home, by credit; what must not
  overtake a group goes this way;
- control: everything else, from any rank to any rank, each under 64 KiB.

`replica` is a replica's number, `home` the number of a trainer home (its DP rank), not a world rank;
the mailbox says from which world rank a message came. Version v is the weights after v training
steps, so step i trains with version i as its start and makes version i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_hpc.records import DropReason


@dataclass(frozen=True, slots=True)
class Claim:
    """Leader to the ledger's owner: up to `count` ordinals, please; I have committed `version`.

    At most one is open per leader. The owner answers when it can give at least one, until then it
    keeps the claim; `Committed` raises its version meanwhile (`claims.Claims`).
    """

    replica: int
    count: int
    version: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """Owner to leader: the ordinals (ascending, at least one) that a replica at `version` may start."""

    ordinals: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Trainer rank 0 to every leader: get ready to receive `version`.

    The probe is fixed tokens with their log-probabilities under these weights at temperature 1:
    `probe_tokens_S` int32, `probe_logp_S` float32, where entry s is the log-probability of token s
    after the tokens before it (entry 0 is 0); both empty when the probe is not asked for.
    """

    version: int
    probe_tokens_S: np.ndarray
    probe_logp_S: np.ndarray


@dataclass(frozen=True, slots=True)
class Ready:
    """Leader to trainer rank 0: the replica is paused and will enter the exchange of `version`."""

    replica: int
    version: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Leader to trainer rank 0 and to the ledger's owner: the replica holds and has proved `version`.

    `report` has what the update cost and what the probe measured (seconds, differences).
    """

    replica: int
    version: int
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trained:
    """Trainer rank 0 to the ledger's owner: step `step` is done and its ordinals are retired."""

    step: int
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """To the ledger's owner, from a leader (beside its tombstone) or trainer rank 0 (its own drops)."""

    ordinals: tuple[int, ...]
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Discard:
    """Trainer rank 0 to the homes: throw these groups away, they are dropped (stale, nonfinite)."""

    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Trainer home to trainer rank 0: a group is here, `tokens` to train, its oldest token's version."""

    home: int
    ordinal: int
    tokens: int
    oldest_version: int


@dataclass(frozen=True, slots=True)
class Tombstone:
    """By mail, leader to the ordinal's home, in the place of a group: dropped, and why.

    The home passes it on to trainer rank 0 by control.
    """

    ordinal: int
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Save:
    """Trainer rank 0 to every leader: answer `Saved` to every home for the checkpoint at `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Saved:
    """By mail, leader to every home, behind the last group queued for it: the cut of `step`."""

    replica: int
    step: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Home to trainer rank 0: every leader's `Saved` of `step` is here, and all that was to be told before it.

    Control is first-in-first-out for a pair, so rank 0 has by now this home's `Arrived` and `Tombstone`.
    """

    home: int
    step: int


@dataclass(frozen=True, slots=True)
class Alive:
    """Leader to trainer rank 0, once a second between engine steps: a sign of life and what it does.

    `engine_step_s` is the longest engine step so far, `running` the samples in flight; `tokens` and
    `engine_s` are the tokens generated and the seconds spent in engine steps in this attempt.
    """

    replica: int
    version: int
    engine_step_s: float
    running: int = 0
    tokens: int = 0
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Working:
    """Trainer rank 0 to all other trainer ranks, once a second while it waits for replicas: a sign of life."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Trainer rank 0 to every leader: score your share of the held-out prompts with `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Leader to trainer rank 0: `prompts` of its share, the sum of their rewards, how many failed to score."""

    replica: int
    version: int
    prompts: int
    reward_sum: float
    failed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Any rank to trainer rank 0: a signal or the end of the walltime was seen here."""

    rank: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Trainer rank 0 to every leader: leave the loop in good order; the job ends with `code`."""

    code: int
