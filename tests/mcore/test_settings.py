"""What has to be the same on all ranks, of what Megatron knows of a job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

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
