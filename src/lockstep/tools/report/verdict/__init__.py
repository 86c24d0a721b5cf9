"""Where a training's time went, in sentences: who was waited for and why, and what would help.
Pure functions of an anatomy.
"""
