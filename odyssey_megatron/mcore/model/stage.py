"""Which stage the user's code believes to be in while a model chunk computes."""

from __future__ import annotations

from typing import Any


class OwnStage:
    """What a forward step takes and sends of a batch depends on the stage, and that is the chunk's."""

    def __init__(self) -> None:
        self._config: Any = None
        """The model's, inside a forward step."""

    def forward_step(self, forward_step: Any, model: Any) -> Any:
        """``forward_step`` of the user's, as of the stage at hand of ``model``."""
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
        """From 0.17 on a forward step asks for each microbatch. Its layers are those of the job, not of the stage."""
        return original(*args, **kwargs) if self._config is None else self._config
