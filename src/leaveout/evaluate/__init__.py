"""How good scores are and what to do with them: verify, refine, cleanse, metrics, plan, precision."""
