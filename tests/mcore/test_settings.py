"""What has to be the same on all ranks, of what Megatron knows of a job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.mcore.loop.arguments import save_steps
from odyssey_megatron.mcore.settings import settings_of


def test_numbers_and_what_all_do_together_count_and_paths_and_functions_do_not():
    flags = SimpleNamespace(eval_interval=5, hidden_dropout=0.1, save="/its/own", tensorboard_dir="own")
    config = SimpleNamespace(lr=0.01, betas=(0.9, 0.95), timers=object(), grad_norm=len)
    assert settings_of(flags, config, {"lr_warmup_steps": 3}, seed=7) == {
        "eval_interval": "5",
        "hidden_dropout": "0.1",
        "lr": "0.01",
        "betas": "(0.9, 0.95)",
        "lr_warmup_steps": "3",
        "seed": "7",
    }


@pytest.mark.parametrize(
    ("save", "persistent", "passing", "steps"),
    [
        ("/a", 100, 20, 20),
        ("/a", 20, 100, 20),
        ("/a", 100, None, 100),
        ("/a", None, 20, 20),
        (None, 100, 20, 0),
    ],
)
def test_a_restart_loads_the_newest_checkpoint_of_either_kind(save, persistent, passing, steps):
    args = SimpleNamespace(save=save, save_interval=persistent, non_persistent_save_interval=passing)
    assert save_steps(args) == steps
