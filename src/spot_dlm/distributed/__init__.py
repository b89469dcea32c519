"""Work and servers on a Ray cluster (docs/ray.md); needs the extra `ray`, which is imported late."""
