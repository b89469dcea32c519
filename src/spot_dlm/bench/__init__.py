"""Benchmarks: acceptance length of every drafter at equal budgets, and accuracy against speed. Knows nothing of commands and terminals."""
