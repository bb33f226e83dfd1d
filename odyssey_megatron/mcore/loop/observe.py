"""``--odyssey observe``: Megatron-LM runs as it would without, while its failures are noticed and decisions about them
made.

A rank only sends heartbeats and reports what is trained; groups, schedule and steps are Megatron's own. The coordinator
says what would be done about a failure (``launch/coordinator/coordinator.py``).
"""

from __future__ import annotations

import sys
from typing import Any

from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig, add_arguments
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.mcore.loop import arguments
from odyssey_megatron.upstream import compat, refusals, seam_table, seams


def attach(config: OdysseyConfig) -> None:
    """Install the observer in ``megatron.training``, which has been imported; a second call does nothing.

    Raises MegatronIncompatible.
    """
    if seams.is_applied(seam_table.PRETRAIN):
        return
    observer = Observer(config)
    seams.wrap(seam_table.PRETRAIN, observer.pretrain)
    seams.wrap(seam_table.SETUP_MODEL_AND_OPTIMIZER, observer.setup_model_and_optimizer)
    seams.wrap(seam_table.BUILD_DATA_ITERATORS, observer.build_data_iterators)
    seams.wrap(seam_table.ADD_MEGATRON_ARGUMENTS, observer.add_megatron_arguments)


class Observer:
    """The observer on one rank."""

    def __init__(self, config: OdysseyConfig):
        self._config = config
        self._connected: Member | None = None
        self._parser = refusals.MegatronParser()

    def add_megatron_arguments(self, original: Any, parser: Any) -> Any:
        parser = original(parser)
        self._parser = refusals.MegatronParser.of(parser, compat.check_version())
        add_arguments(parser)
        return parser

    def pretrain(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._connected = Member.connect(self._config)
        return original(*args, **kwargs)

    @property
    def _member(self) -> Member:
        assert self._connected is not None
        return self._connected

    def setup_model_and_optimizer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            self._post()
        except OdysseyError as error:
            self._say(f"what it would do cannot be said: {error}")
        return result

    def build_data_iterators(self, original: Any, provider: Any) -> Any:
        # Megatron's compiled helpers keep the GIL while they build an index.
        with self._member.liveness.excused():
            return original(provider)

    def _post(self) -> None:
        from megatron.training import get_args
        from megatron.training.arguments import core_transformer_config_from_args

        args = get_args()
        said = list(refusals.reasons(args, self._parser).values())
        if other := refusals.script_refused(sys.argv[0]):
            said.append(other)
        for message in said:
            self._say(f"--odyssey recover would refuse this job: {message}")
        for flag, why in self._config.without_effect(distributed=args.use_distributed_optimizer):
            self._say(f"{flag} changes nothing here: {why}.")
        config = core_transformer_config_from_args(args)
        job = arguments.job_of(
            args,
            config,
            self._config,
            arguments.split_of(args)(config),
            batch_size=arguments.batches_of(args).largest,
            optimizer_copies=arguments.optimizer_copies(args, self._config),
        )
        job.check(self._member.world_size)
        profile = arguments.profile_of(args, config, self._config, arguments.moments_of(args))
        self._member.starting.post_job(job, to_json(profile))

    def _say(self, text: str) -> None:
        if self._member.rank == 0:
            sys.stderr.write(f"[odyssey] {text}\n")
