"""Lockstep inside other frameworks: Accelerate, DCP, Hydra, Lightning, Ray Train, transformers."""
