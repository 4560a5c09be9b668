"""Will it fit? Memory, disk and network of a run, from a model's config.json alone (docs/planning.md)."""
