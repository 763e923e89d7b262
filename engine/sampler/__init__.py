"""Choosing tokens from logits; docs/sampling.md says how, engine.sampler.definition exactly."""
