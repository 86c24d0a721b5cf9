"""Pictures of schedules, steps, meshes and data, computed by the code that a training runs."""
