"""Reference recipes for data-parallel training with PaddlePaddle's Fleet API."""
