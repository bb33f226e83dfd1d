"""The stage that the user's code believes to be in while a model chunk computes."""

from __future__ import annotations

from typing import Any


class OwnStage:
    """Makes Megatron's arguments agree with the chunk that computes: what a forward step takes and sends of a batch
    depends on the stage.
    """

    def __init__(self) -> None:
        self._config: Any = None
        """The model's config, inside a forward step."""

    def forward_step(self, forward_step: Any, model: Any) -> Any:
        """The user's ``forward_step``, run as if in the current stage of ``model``."""
        from megatron.core import parallel_state
        from megatron.training import get_args

        def in_stage(data_iterator: Any, chunk: Any) -> Any:
            args = get_args()
            usual = args.pipeline_model_parallel_size
            args.pipeline_model_parallel_size = parallel_state.get_pipeline_model_parallel_world_size()
            self._config = model.spec.config
            try:
                return forward_step(data_iterator, chunk)
            finally:
                args.pipeline_model_parallel_size, self._config = usual, None

        return in_stage

    def transformer_config(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """From 0.17 on a forward step asks for the config in each microbatch. It must get the job's layers, not the
        stage's.
        """
        return original(*args, **kwargs) if self._config is None else self._config
