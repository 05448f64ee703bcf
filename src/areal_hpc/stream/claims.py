"""Open claims at the ledger's owner: asked by message, answered by message, never waited for."""

from __future__ import annotations

from dataclasses import replace

from areal_hpc.stream.ledger import InvariantError, Ledger
from areal_hpc.stream.messages import Claim, Claimed


class Claims:
    """The open claims at the ledger's owner, at most one per leader; each is answered once it can get something."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: dict[int, Claim] = {}

    def ask(self, claim: Claim) -> None:
        """Raises InvariantError when this replica has a claim open."""
        if claim.replica in self._open:
            raise InvariantError(f"replica {claim.replica} claims again while {self._open[claim.replica]} is open")
        self._open[claim.replica] = claim

    def committed(self, replica: int, version: int) -> None:
        """A replica holds a newer version: so does its open claim."""
        if replica in self._open:
            self._open[replica] = replace(self._open[replica], version=version)

    def answers(self) -> list[tuple[int, Claimed]]:
        """(replica, answer) for all that can be answered now, those open longest first.

        Call it after `ask`, `committed` and every drop or trained step of the ledger.
        """
        out: list[tuple[int, Claimed]] = []
        for replica, claim in list(self._open.items()):
            ordinals = self._ledger.claim(claim.count, claim.version)
            if ordinals:
                del self._open[replica]
                out.append((replica, Claimed(tuple(ordinals), claim.version)))
        return out
