"""Report where a training's time went. Sentences name the ranks that others waited for and what
would help. The HTML page is self-contained and has no scripts; it works in light and dark, on a
phone and on paper.
"""
