"""Real English text that every Python has, as a Megatron indexed dataset of bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

END_OF_DOCUMENT = 256
VOCAB_SIZE = 384
"""256 bytes and the end of a document, padded to a multiple of 128 as Megatron does."""


class ByteTokenizer:
    """What Megatron's datasets ask of a tokenizer, for text that is bytes already."""

    vocab_size = VOCAB_SIZE
    eod, pad = END_OF_DOCUMENT, END_OF_DOCUMENT + 1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "ByteTokenizer"}


def build(prefix: Path) -> str:
    """Writes the standard library's help topics to ``prefix``.bin and .idx, unless they are there."""
    from pydoc_data.topics import topics

    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        unfinished = prefix.with_name(f"{prefix.name}-{os.getpid()}")  # another rank may be building, too
        builder = IndexedDatasetBuilder(str(unfinished.with_suffix(".bin")), dtype=numpy.uint16)
        for _, text in sorted(topics.items()):
            document = [*text.encode(), END_OF_DOCUMENT]
            builder.add_document(torch.tensor(document), [len(document)])
        builder.finalize(str(unfinished.with_suffix(".idx")))
        for suffix in (".bin", ".idx"):
            unfinished.with_suffix(suffix).rename(prefix.with_suffix(suffix))
    return str(prefix)


def dataset(prefix: str, *, seq_length: int, num_samples: int, seed: int, cache: Path) -> Any:
    """Megatron's GPTDataset over ``prefix``: sample i is the same on every rank."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, config).build()
    return train
