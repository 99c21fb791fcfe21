"""Programs that measure; each says in its first lines what it measures and how to run it."""
