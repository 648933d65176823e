"""Seeded workloads: groups of sessions, recorded as a gateway records them.

API, pure and deterministic (equal arguments give equal records on every machine):

    PRESETS                          name → Preset: `polar-swe`, `tau2-like`, `deep-agent`, and `…-drift`
    make_group("deep-agent", 0)      → GroupLoad: one group of that preset; other numbers are other tasks
    GroupLoad.members[i]             → SessionLoad(opened, records, sealed, reward)
    GroupLoad.new_tokens             tokens that the records carry (new prompt ids + sampled ids)
    GroupLoad.naive_tokens           sum over calls of prompt + completion
    GroupLoad.sampled_tokens         sampled ids of all calls, the lost first attempts included
    stitch_group(load)               → the members' Trajectories, in order

A preset's numbers are means in tokens; each length is drawn from a lognormal with that mean and
SIGMA. Ids are uniform over the vocabulary, so members share tokens only where their prompts are
equal: system and tools (all groups of a preset), the task (a group), a sub-agent's system. Every
prompt is encoded against the earlier call of its session with the longest common prefix. An answer
ends with END_OF_TURN.

What the presets leave open is fixed here: a compaction call is asked by 100 fixed tokens; a
sub-agent's task and its report to the main chain are as long as an observation; a retried call's
first attempt is lost half way (`client_aborted`). In `…-drift` RETOKENISED of the calls come back
with two sampled ids as one other id, and at every USER_TURN-th observation of a chain, which is a
user turn then, the thinking (the first THINKING of the ids) of all earlier answers is left out.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from bench.played_session import PlayedSession, Source
from bench.presets import PRESETS, Preset
from polar.core.stitching import stitch
from schemas.calls import CallRecord, SessionOpened, SessionSealed
from schemas.ids import session_id
from schemas.sessions import Outcome
from schemas.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """One member: its records in order, between its opening and its seal."""

    opened: SessionOpened
    records: list[CallRecord]
    sealed: SessionSealed
    reward: float
    """0.00 … 1.00, as a share of passed tests."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """One task's sessions."""

    preset: Preset
    group_id: str
    members: list[SessionLoad]

    @property
    def records(self) -> list[CallRecord]:
        """All call records, member by member."""
        return [record for member in self.members for record in member.records]

    @property
    def new_tokens(self) -> int:
        """Tokens that the records carry; what a delta refers to is not counted."""
        return sum(len(record.prompt.new_ids) + len(record.sampled_ids) for record in self.records)

    @property
    def naive_tokens(self) -> int:
        """Tokens of all calls, each with its whole prompt."""
        return sum(
            record.prompt.kept + len(record.prompt.new_ids) + len(record.sampled_ids)
            for record in self.records
        )

    @property
    def sampled_tokens(self) -> int:
        """Sampled ids of all calls."""
        return sum(len(record.sampled_ids) for record in self.records)


def make_group(preset: Preset | str, group: int = 0, *, seed: int = 0) -> GroupLoad:
    """Group number `group` of a preset. A `…-drift` preset has the sessions of its plain one."""
    preset = PRESETS[preset] if isinstance(preset, str) else preset
    family = zlib.crc32(preset.name.removesuffix("-drift").encode())
    shared = Source(np.random.default_rng([seed, family]))
    system = shared.turn("system", preset.system)
    subagent_system = shared.turn("system", preset.subagent_system) if preset.subagents_after else system
    task = Source(np.random.default_rng([seed, family, 1, group])).turn("user", preset.task)
    group_id = f"{preset.name}-{group}"
    members = []
    for member in range(preset.members):
        of_member = [seed, family, 2, group, member]
        name = session_id(group_id, member, 0, 1)
        source = Source(np.random.default_rng(of_member))
        session = PlayedSession(preset, name, group_id, source, np.random.default_rng([*of_member, 1]))
        session.run(system, task, subagent_system)
        members.append(
            SessionLoad(
                SessionOpened(session_id=name, group_id=group_id, gateway_id="bench"),
                session.records,
                SessionSealed(
                    session_id=name,
                    group_id=group_id,
                    calls=len(session.records),
                    outcome=Outcome.COMPLETED,
                ),
                round(float(source.rng.random()), 2),
            )
        )
    return GroupLoad(preset, group_id, members)


def stitch_group(load: GroupLoad) -> list[Trajectory]:
    """The trajectories of the members, in order."""
    return [stitch(member.opened, member.records, member.sealed) for member in load.members]
