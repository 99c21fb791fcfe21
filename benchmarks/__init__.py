"""Programs that measure; each says in its first lines what it measures and how to run it."""

from recipes.installed import require_packages

require_packages()
