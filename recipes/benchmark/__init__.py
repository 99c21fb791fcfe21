"""``task=benchmark``: how fast a training is, where its time goes, and a record of both."""
