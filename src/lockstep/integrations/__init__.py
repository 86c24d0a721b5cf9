"""Lockstep inside other frameworks: Accelerate, DCP, Lightning, Ray Train, transformers."""
