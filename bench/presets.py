"""The fixed presets of the generated workloads. Never tuned to a result."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Preset:
    """What a group looks like; lengths are mean tokens."""

    name: str
    members: int
    system: int
    """System prompt and tools, shared by all."""
    task: int
    calls: int
    """Calls of the main chain, retries and compaction not counted."""
    sampled: int
    observation: int
    subagents_after: tuple[int, ...] = ()
    """Main calls after which a sub-agent runs."""
    subagent_calls: int = 0
    subagent_system: int = 0
    compaction_after: int = 0
    """Main call after which the history is compacted; 0: never."""
    compacting: float = 0.0
    """Share of the members that compact."""
    summary: int = 0
    retried: float = 0.0
    drift: bool = False


_PLAIN = (
    Preset("polar-swe", members=16, system=3_000, task=800, calls=6, sampled=400, observation=1_200),
    Preset(
        "tau2-like", members=8, system=4_500, task=300, calls=25, sampled=120, observation=350,
        compaction_after=12, compacting=0.1, summary=1_000,
    ),
    Preset(
        "deep-agent", members=8, system=9_000, task=1_500, calls=60, sampled=180, observation=600,
        subagents_after=(15, 45), subagent_calls=8, subagent_system=4_000,
        compaction_after=30, compacting=1.0, summary=1_000, retried=0.02,
    ),
)  # fmt: skip
PRESETS = {
    preset.name: preset
    for plain in _PLAIN
    for preset in (plain, replace(plain, name=f"{plain.name}-drift", drift=True))
}
