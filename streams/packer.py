"""polar.groups.v1 → polar.batches.v1: the manifest, then its rows. One process."""

from faststream import FastStream

from polar.core.batching import BatchRule
from polar.core.packer_stage import PackerCore
from polar.kafka.stage import stage_app
from polar.settings import LogSettings, PackerSettings
from schemas.topics import BATCHES, GROUPS, POLICIES


def create_app(log: LogSettings, settings: PackerSettings) -> FastStream:
    """The packer of one policy."""
    core = PackerCore(
        BatchRule(
            policy=settings.policy,
            groups_per_batch=settings.groups_per_batch,
            row_tokens=settings.row_tokens,
            builder=settings.builder,
            max_staleness=settings.max_staleness,
        )
    )
    return stage_app(
        log,
        core,
        (GROUPS, BATCHES, POLICIES),
        group_id=f"{log.topic_prefix}.packer",
        start_at_beginning=(POLICIES,),
        in_thread=True,
    )
