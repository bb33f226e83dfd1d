"""Ways of microbatches through workers that hold the layers already: around dead and slow ones, and slow links."""
