"""What scores are worth and what to do with them: verify, refine, cleanse, metrics, plan, precision."""
